"""Batches from a remote folder: those from a copy of it here, whatever room the cache has and whoever reads."""

import json
import pickle
import time
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from torch.utils.data import get_worker_info

from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.mixture_datamodule import MixtureDataModule
from datamodules.packing import grouped
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.padded_documents import PaddedDocuments
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from datamodules.remote import remote_folder
from datamodules.remote.remote_folder import open_remote, remote_of
from tests.support.corpus import corpus, prepare

PACKINGS = [Concatenate(), Concatenate(mask_documents=True), BestFit(), PaddedDocuments()]
LARGEST = 800
"""Bytes of the largest shard, about."""


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A prepared folder of many shards of about 500 bytes."""
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(corpus(folder / "source", documents=60), folder / "out", writer=TokenShards(500))


@pytest.fixture(scope="module")
def url(storage, local):
    return storage.upload(local, "batches")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(grouped, "GROUP", 32)


def build(source, packing, storage, cache, limit=None, **options):
    options = {"sequence_length": 48, "batch_size": 3, "seed": 1} | options
    data = PretrainDataModule(
        TextDocuments, BPETokenizer(300), TokenShards(), packing, source=str(source), cache_dir=str(cache),
        cache_bytes=limit, storage_options=storage.options, **options,
    )  # fmt: skip
    data.prepare_data()
    data.setup()
    return data


def same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def cached(data):
    """The sizes of the chunks that are here, but for those under way."""
    found = remote_folder._cached(data.folder.parent)
    return {
        path.name: size for _, size, path in found if path.suffix == ".bin" and path.parent.name == "train"
    }


@pytest.mark.parametrize(
    ("packing", "limit", "workers"),
    [
        pytest.param(PACKINGS[0], 1, 0, marks=pytest.mark.ci),
        pytest.param(PACKINGS[0], 4 * LARGEST, 2, marks=pytest.mark.slow),
        pytest.param(PACKINGS[1], 4 * LARGEST, 0, marks=pytest.mark.ci),
        pytest.param(PACKINGS[1], 1 << 20, 2, marks=pytest.mark.slow),
        (PACKINGS[2], 1 << 20, 0),
        pytest.param(PACKINGS[2], 4 * LARGEST, 2, marks=pytest.mark.slow),
        pytest.param(PACKINGS[3], 4 * LARGEST, 0, marks=pytest.mark.ci),
    ],
)
def test_the_batches_are_those_of_a_copy_here(local, url, storage, tmp_path, packing, limit, workers):
    here = build(local, packing, storage, tmp_path)
    remote = build(url, packing, storage, tmp_path, limit, num_workers=workers)
    assert remote.folder != here.folder
    assert (remote.vocab_size, remote.tokenizer_json) == (here.vocab_size, here.tokenizer_json)
    loaders = here.train_dataloader(), remote.train_dataloader()
    count = len(loaders[0]) * 3 // 2  # into the second epoch
    found, expected = ([b for _ in range(2) for b in islice(loader, count // 2)] for loader in loaders[::-1])
    same(found, expected)
    same(list(remote.val_dataloader()), list(here.val_dataloader()))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_a_run_goes_on_from_either_place(local, url, storage, tmp_path, workers):
    packing = BestFit()
    places = [
        build(url, packing, storage, tmp_path, 4 * LARGEST, num_workers=workers),
        build(local, packing, storage, tmp_path),
    ]
    expected = list(islice(places[1].train_dataloader(), 12))
    for before, after in (places, places[::-1]):
        first = list(islice(before.train_dataloader(), 5))
        state = json.loads(json.dumps(before.state_dict()))
        after.load_state_dict(state)
        same(first + list(islice(after.train_dataloader(), 7)), expected)
        for data in places:
            data.setup()


@pytest.mark.slow
def test_mixtures_of_both(local, url, storage, tmp_path):
    def mixture(one, other, **options):
        data = MixtureDataModule(
            {"one": str(one), "other": str(other)}, {"one": 0.7, "other": 0.3}, Concatenate(),
            sequence_length=48, batch_size=5, cache_dir=str(tmp_path), storage_options=storage.options, **options,
        )  # fmt: skip
        data.setup()
        return data

    expected = mixture(local, local)
    for options in ({"cache_bytes": 3 * LARGEST}, {"num_workers": 2}):
        for sources in ((url, local), (url, url)):
            remote = mixture(*sources, **options)
            same(list(islice(remote.train_dataloader(), 16)), list(islice(expected.train_dataloader(), 16)))
            same(list(remote.val_dataloader()), list(expected.val_dataloader()))


@pytest.mark.parametrize("packing", PACKINGS, ids=["plain", "masked", "best fit", "padded"])
def test_every_chunk_is_downloaded_once_if_there_is_room(url, storage, tmp_path, packing):
    data = build(url, packing, storage, tmp_path)
    before = len(storage.downloads("batches"))
    loader = data.train_dataloader()
    for _ in range(2):
        for _ in loader:
            pass
    chunks = [n for n in storage.downloads("batches")[before:] if n.startswith("train/chunk")]
    assert len(chunks) == len(set(chunks)) == len(cached(data))


@pytest.mark.ci
def test_the_cache_stays_within_its_limit(url, storage, tmp_path):
    limit = 4 * LARGEST
    data = build(url, Concatenate(), storage, tmp_path, limit)
    most = 0
    for _ in islice(data.train_dataloader(), 30):
        most = max(most, sum(cached(data).values()))
    chunks = json.loads((data.folder / "train/index.json").read_text())["chunks"]
    assert LARGEST < most <= limit < sum(chunk["chunk_bytes"] for chunk in chunks) / 2


def test_what_comes_next_is_fetched_while_a_batch_is_used(url, storage, tmp_path):
    data = build(url, Concatenate(), storage, tmp_path, shuffle=False, batch_size=1)
    needed = TokenStore(data.folder / "train").chunks_between(0, 3 * 48 + 1)
    batches = iter(data.train_dataloader())
    for _ in range(3):  # it has looked at six by then
        next(batches)
    for _ in range(100):
        time.sleep(0.1)
        if len(cached(data)) > len(needed):
            break
    assert len(cached(data)) > len(needed)


def test_a_spawned_process_reads_the_same(local, url, storage, tmp_path):
    folder = open_remote(url, tmp_path, None, storage.options)
    store, here = TokenStore(folder / "train"), TokenStore(local / "train")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.remote is not None
    for one in (store, copy):
        assert one.read(0, len(here)).tolist() == here.read(0, len(here)).tolist()
        assert one.document_starts().tolist() == here.document_starts().tolist()
    assert get_worker_info() is None


# What is wrong -------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_chunk_ends_the_run_with_its_name(local, storage, tmp_path, workers, damage):
    prefix = f"damaged-{workers}-{damage}"
    url = storage.upload(local, prefix)
    key = f"{prefix}/train/chunk-0-5.bin"
    content = storage.read(key)
    storage.client.delete_object(Bucket=storage.bucket, Key=key)
    if damage == "cut":
        storage.put(key, content[:-9])  # fewer could be zeros, which the room held for it is full of
    data, before = build(url, Concatenate(), storage, tmp_path, num_workers=workers), set(active_children())
    with pytest.raises(ConfigError) as caught:
        for _ in data.train_dataloader():
            pass
    assert set(active_children()) <= before, "workers go on"
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith(f"{url}/train/chunk-0-5.bin ")
    assert ("is damaged" if damage == "cut" else "cannot be read") in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda chunk: chunk.update(filename="../../../chunk.bin"), "it is no name in the folder"),
        (lambda chunk: chunk.update(filename="other.bin"), "do not agree on train/other.bin"),
        (lambda chunk: chunk.update(chunk_bytes=chunk["chunk_bytes"] + 2), "do not agree on train/chunk-0-0.bin"),
        (lambda chunk: chunk.update(chunk_size=2), "its header does not describe 2 items"),
    ],
)  # fmt: skip
def test_an_index_that_says_something_else(local, storage, tmp_path, change, message):
    index = json.loads((local / "train/index.json").read_text())
    change(index["chunks"][0])
    manifest = json.loads((local / "manifest.json").read_text())
    content = json.dumps(index).encode()
    from hashlib import sha256

    manifest["files"]["train/index.json"] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    del manifest["sha256"]
    url = storage.upload(local, "index")
    storage.put("index/train/index.json", content)
    storage.put("index/manifest.json", json.dumps(manifest).encode())
    folder = open_remote(url, tmp_path, None, storage.options)
    with pytest.raises(ConfigError) as caught:
        TokenStore(folder / "train").document_starts()
    assert message in str(caught.value)
    assert not list(Path(tmp_path).rglob("chunk.bin"))
    assert remote_of(folder) is not None
