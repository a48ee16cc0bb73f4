"""Folders of tokens that litdata wrote: every token is read as litdata reads it, and in our exact order."""

import csv
import json
import shutil
from itertools import chain, islice, pairwise

import numpy as np
import pytest
import torch
import zstandard
from litdata import StreamingDataset, TokensLoader
from tokenizers import Tokenizer, models

from core.__main__ import main
from core.data.token_loader import _as_it_is
from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from datamodules.litdata_datamodule import LitdataDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.token_store import TokenStore, part_of
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import corpus, prepare
from tests.support.litdata_folders import compress, write_litdata

IDS = 300
rng = np.random.default_rng(0)
DOCUMENTS = [rng.integers(0, IDS, length).tolist() for length in rng.integers(1, 200, 80)]
STREAM = list(chain.from_iterable(DOCUMENTS))
KINDS = {
    "uint16": lambda ids: np.array(ids, np.uint16),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "torch.int32, as litgpt": lambda ids: torch.tensor(ids, dtype=torch.int),
    "torch.int64": torch.tensor,
    "torch.uint16": lambda ids: torch.tensor(ids).to(torch.uint16),
}
INT32 = KINDS["torch.int32, as litgpt"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    names = {"<|endoftext|>": 0} | {f"t{number}": number for number in range(1, IDS)}
    found = Tokenizer(models.BPE(names, []))
    found.add_special_tokens(["<|endoftext|>"])
    found.save(str(path))
    return path


@pytest.fixture
def build(tokenizer, tmp_path):
    def make(source, packing=None, **options):
        options = {"sequence_length": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache"),
                   "tokenizer": PretrainedTokenizer(str(tokenizer))} | options  # fmt: skip
        return LitdataDataModule(str(source), packing or Concatenate(), **options)

    return make


@pytest.fixture
def opened(build):
    """Builds, sets up, and returns the stores of the splits."""

    def make(source, **options):
        data = build(source, **options)
        data.setup()
        return data, {split: TokenStore(folder) for split, folder in data.splits.items()}

    return make


def tokens(store):
    return store.read(0, len(store)).tolist()


def documents(store):
    return [store.read(a, b).tolist() for a, b in pairwise([*store.document_starts(), len(store)])]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_that_litdata_reads(opened, tmp_path, name):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, KINDS[name])
    _, stores = opened(folder)
    assert tokens(stores["train"]) + tokens(stores["validation"]) == STREAM
    whole = TokenStore(folder)
    assert documents(whole) == DOCUMENTS
    blocks, at = [], 0  # litdata cuts each chunk into blocks and drops the chunk's rest
    for chunk in json.loads((folder / "index.json").read_text())["chunks"]:
        full = chunk["dim"] // 16 * 16
        blocks += whole.read(at, at + full).reshape(-1, 16).tolist()
        at += chunk["dim"]
    read = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=16))
    assert [block.tolist() for block in read] == blocks


def test_subfolders_are_the_splits(opened, tmp_path):
    for split, part in {"train": DOCUMENTS[:50], "val": DOCUMENTS[50:70], "test": DOCUMENTS[70:]}.items():
        write_litdata(tmp_path / "tokens" / split, part, INT32)
    data, stores = opened(tmp_path / "tokens")
    expected = {"train": DOCUMENTS[:50], "validation": DOCUMENTS[50:70], "test": DOCUMENTS[70:]}
    assert {split: documents(store) for split, store in stores.items()} == expected
    assert data.test_split == "test"
    assert data.train_tokens == sum(map(len, DOCUMENTS[:50]))


def test_the_tokenizer_may_lie_in_the_folder(opened, tokenizer, tmp_path):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, INT32)
    shutil.copy(tokenizer, folder)
    data, _ = opened(folder, tokenizer=None)
    assert (data.vocab_size, data.end_of_text_id) == (IDS, 0)


@pytest.mark.parametrize("chunk_bytes", [100, 900, 1 << 20])
def test_a_part_of_a_folder_is_that_part(tmp_path, chunk_bytes):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, INT32, chunk_bytes)
    starts = np.cumsum([0, *map(len, DOCUMENTS)])
    for _ in range(40):
        first, stop = sorted(rng.choice(len(STREAM), 2, replace=False).tolist())
        store = TokenStore(part_of(folder, first, stop))
        assert tokens(store) == STREAM[first:stop]
        inside = [at - first for at in starts.tolist() if first < at < stop]
        assert store.document_starts().tolist() == [0, *inside]
        assert store.number_of_documents == 1 + len(inside)
        low, high = sorted(rng.choice(stop - first + 1, 2).tolist())
        expected = [at for at in [0, *inside, stop - first] if low <= at < high]
        assert store.starts_between(low, high).tolist() == expected
        bounds = [0, *inside, stop - first]
        numbers = np.arange(1 + len(inside))
        assert store.documents(numbers).tolist() == [[a, b - a] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.9])
def test_what_is_held_out_ends_the_stream(opened, tmp_path, fraction):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, INT32)
    data, stores = opened(folder, validation_fraction=fraction)
    train, validation = tokens(stores["train"]), tokens(stores["validation"])
    assert train + validation == STREAM
    assert len(validation) / len(STREAM) == pytest.approx(fraction, rel=0.5, abs=2 / len(STREAM))
    if fraction >= 0.05:  # a document is far shorter than the share
        assert len(train) in np.cumsum([*map(len, DOCUMENTS)])
    labels = sum(int((batch["labels"] != -100).sum()) for batch in data.val_dataloader())
    assert labels == len(validation) - 1


def test_one_endless_document_is_cut_at_a_token(opened, tmp_path):
    folder = write_litdata(tmp_path / "tokens", [STREAM], INT32)
    _, stores = opened(folder)
    assert tokens(stores["train"]) + tokens(stores["validation"]) == STREAM
    assert len(stores["validation"]) == round(len(STREAM) * 0.05)


def test_documents_without_tokens_are_no_damage(opened, tmp_path):
    with_empty = [[], *DOCUMENTS[:40], [], [], *DOCUMENTS[40:], []]
    folder = write_litdata(tmp_path / "tokens", with_empty, INT32)
    for packing in (Concatenate(mask_documents=True), BestFit()):
        data, stores = opened(folder, packing=packing)
        assert tokens(stores["train"]) + tokens(stores["validation"]) == STREAM
        assert len(list(data.train_dataloader())) == len(data.train_dataloader())


# The position ------------------------------------------------------------------------------------------


def rows(data, steps, world=1, cursor=None, batch_size=4):
    """The rows of global batches, from all ranks, and the cursor after them."""
    found = [[] for _ in range(steps)]
    for rank in range(world):
        order = {"sequence_length": 16, "batch_size": batch_size, "shuffle": True, "seed": 3}
        batches = data.packed("train", rank=rank, world_size=world, **order)
        batches.cursor = cursor or batches.cursor
        for step, (after, batch) in enumerate(islice(batches, steps)):
            found[step] += batch["input_ids"].tolist()
            last = after
    return found, last


@pytest.mark.parametrize("packing", [Concatenate(), Concatenate(mask_documents=True), BestFit()])
def test_ranks_and_resuming_change_nothing(opened, tmp_path, packing):
    data, _ = opened(write_litdata(tmp_path / "tokens", DOCUMENTS, INT32), packing=packing)
    steps = 200  # more than an epoch
    expected, _ = rows(data, steps)
    assert rows(data, steps, world=2, batch_size=2)[0] == expected
    cursor = None
    for step in range(0, steps, 17):
        more, cursor = rows(data, 17, *((4, cursor, 1) if step % 2 else (1, cursor)))
        assert more[: steps - step] == expected[step : step + 17]


@pytest.mark.parametrize(
    "context", [pytest.param("fork", marks=pytest.mark.ci), pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_workers_change_nothing(opened, tmp_path, context):
    data, _ = opened(write_litdata(tmp_path / "tokens", DOCUMENTS, INT32))
    expected = [batch["input_ids"].tolist() for batch in data.train_dataloader()]
    batches = data.train_dataloader().batches
    reader = torch.utils.data.DataLoader(
        batches, batch_size=None, num_workers=2, multiprocessing_context=context, collate_fn=_as_it_is
    )
    assert [batch["input_ids"].tolist() for _, batch in islice(reader, len(expected))] == expected


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(corpus(folder / "source", documents=60), folder / "out", writer=TokenShards(500))


def same_tokens(prepared, folder, kind=INT32):
    """Writes with litdata what `prepare` wrote."""
    for split, name in {"train": "train", "validation": "val"}.items():
        write_litdata(folder / name, documents(TokenStore(prepared / split)), kind)
    return folder


def test_batches_are_those_of_the_same_tokens_prepared(opened, prepared, tmp_path):
    ours = PretrainDataModule(None, None, None, Concatenate(), source=str(prepared), sequence_length=16)
    ours.setup()
    theirs, _ = opened(
        same_tokens(prepared, tmp_path / "tokens"),
        tokenizer=PretrainedTokenizer(str(prepared / "tokenizer.json")),
        batch_size=8,
    )
    for loader in ("train_dataloader", "val_dataloader"):
        pairs = list(zip(getattr(ours, loader)(), getattr(theirs, loader)(), strict=True))
        assert len(pairs) > 2
        assert all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)


@pytest.mark.ci
def test_losses_are_those_of_the_same_tokens_prepared(prepared, tiny, write_yaml, tmp_path):
    tiny["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "log_every_n_steps": 1,
        "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
        "val_check_interval": 6, "check_val_every_n_epoch": None}  # fmt: skip
    tiny["model"]["network"]["init_args"]["vocab_size"] = 320
    rows = {"sequence_length": 16, "batch_size": 4, "packing": "Concatenate"}
    ours = {
        "reader": "TextDocuments",
        "tokenizer": "BPETokenizer",
        "writer": "TokenShards",
        "source": str(prepared),
    }
    path = {"path": str(prepared / "tokenizer.json")}
    theirs = {"source": str(same_tokens(prepared, tmp_path / "tokens")),
              "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": path}}  # fmt: skip
    for kind, own in {"PretrainDataModule": ours, "LitdataDataModule": theirs}.items():
        tiny["data"] = {"class_path": kind, "init_args": rows | own}
        assert main(["fit", f"--config={write_yaml('run.yaml', tiny)}"]) == 0
    found = []
    for name in ("run", "run-2"):
        with open(tmp_path / name / "metrics.csv", encoding="utf-8", newline="") as file:
            found.append([(line["train/loss"], line["val/loss"]) for line in csv.DictReader(file)])
    assert found[0] == found[1]
    assert len(found[0]) >= 6


# Compressed, and remote ---------------------------------------------------------------------------------


def test_compressed_chunks_are_read_through_the_cache(opened, build, tmp_path):
    plain = write_litdata(tmp_path / "plain", DOCUMENTS, INT32)
    packed = compress(shutil.copytree(plain, tmp_path / "packed"))
    expected, _ = rows(opened(plain)[0], 50)
    for limit in (None, 2000):  # with room for two chunks
        data, _ = opened(packed, cache_bytes=limit, cache_dir=str(tmp_path / f"cache-{limit}"))
        assert rows(data, 50)[0] == expected
    kept = sum(path.stat().st_size for path in (tmp_path / "cache-2000").rglob("*.bin"))
    assert kept < 6000
    # other content under the same names
    compress(shutil.copytree(write_litdata(tmp_path / "other", DOCUMENTS[::-1], INT32), tmp_path / "new"))
    shutil.rmtree(packed)
    (tmp_path / "new").rename(packed)
    _, stores = opened(packed)
    assert tokens(stores["train"]) + tokens(stores["validation"]) == [*chain.from_iterable(DOCUMENTS[::-1])]


@pytest.mark.ci
@pytest.mark.parametrize("packed", [False, True])
def test_folders_on_object_storage(opened, storage, tmp_path, packed):
    plain = {split: write_litdata(tmp_path / "tokens" / split, part, INT32)
             for split, part in {"train": DOCUMENTS[:60], "val": DOCUMENTS[60:]}.items()}  # fmt: skip
    expected = {split: tokens(TokenStore(folder)) for split, folder in plain.items()}
    for folder in plain.values() if packed else ():
        compress(folder)
    url = storage.upload(tmp_path / "tokens", f"litdata-{packed}")
    data, stores = opened(url, storage_options=storage.options)
    assert tokens(stores["train"]) == expected["train"]
    assert tokens(stores["validation"]) == expected["val"]
    assert len(rows(data, 30)[0]) == 30
    data, stores = opened(f"{url}/train/", storage_options=storage.options)  # a folder without subfolders
    assert tokens(stores["train"]) + tokens(stores["validation"]) == expected["train"]


# What is refused -----------------------------------------------------------------------------------------


def edit(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def first(folder):
    return folder / json.loads((folder / "index.json").read_text())["chunks"][0]["filename"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def outside(path):
    other = path.parent.parent / "elsewhere.bin"
    path.rename(other)
    path.symlink_to(other)


def negative(path):
    raw = bytearray(path.read_bytes())
    raw[-4:] = np.int32(-1).tobytes()
    path.write_bytes(raw)


BROKEN = {
    "no index": (lambda f: (f / "index.json").unlink(), r"index.json is missing or damaged.*\n.*TokensLoader"),
    "floats": (lambda f: edit(f, lambda i: i["config"].update(data_format=["no_header_tensor:1"])), "not token ids"),
    "another item loader": (lambda f: edit(f, lambda i: i["config"].update(data_format=["str"])), "not token ids"),
    "encrypted": (lambda f: edit(f, lambda i: i["config"].update(encryption={"algorithm": "fernet"})), "encrypted"),
    "framed": (lambda f: edit(f, lambda i: i["config"].update(compression="zstd", compression_level="batch")), "batch"),
    "no chunks": (lambda f: edit(f, lambda i: i.update(chunks=[])), "no chunks"),
    "a chunk elsewhere": (lambda f: edit(f, lambda i: i["chunks"][0].update(filename="../a.bin")), "no name in the folder"),
    "a larger chunk": (lambda f: edit(f, lambda i: i["chunks"][0].update(chunk_bytes=1 << 20)), "bytes, index.json says"),
    "a truncated chunk": (lambda f: cut(first(f)), "bytes, index.json says"),
    "a missing chunk": (lambda f: first(f).unlink(), "is missing or damaged: No such file"),
    "a link out of the folder": (lambda f: outside(first(f)), "symbolic link leads out"),
    "a negative id": (lambda f: negative(first(f)), "token id 4,294,967,295"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_damage_is_refused(opened, tmp_path, what):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, INT32)
    change, message = BROKEN[what]
    change(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(folder)
    assert len(str(caught.value).splitlines()) <= 10


def test_negative_ids_of_64_bits_are_refused_when_they_are_read(opened, tmp_path):
    documents = [*DOCUMENTS[:40], [5, -7, 5], *DOCUMENTS[40:]]
    with pytest.raises(ConfigError, match="token id -7"):
        opened(write_litdata(tmp_path / "more", documents, KINDS["int64"]))


def bomb(path):
    path.write_bytes(zstandard.compress(bytes(1 << 26)))


@pytest.mark.parametrize(("change", "message"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is damaged"),
    (lambda path: path.write_bytes(b"nonsense"), "is damaged"),
    (bomb, "is damaged: there are more than"),
])  # fmt: skip
def test_damage_of_compressed_chunks_is_refused(opened, tmp_path, change, message):
    folder = compress(write_litdata(tmp_path / "tokens", DOCUMENTS, INT32))
    change(first(folder))
    with pytest.raises(ConfigError, match=message):
        opened(folder)


def test_a_tokenizer_that_is_too_small_trained_or_missing_is_refused(opened, build, tmp_path):
    folder = write_litdata(tmp_path / "tokens", [*DOCUMENTS, [IDS]], INT32)
    with pytest.raises(ConfigError, match=r"has the token id 300, data.tokenizer has 300 ids"):
        opened(folder)
    with pytest.raises(ConfigError, match="is a BPETokenizer, which is trained on text"):
        build(folder, tokenizer=BPETokenizer(300))
    with pytest.raises(ConfigError, match=r"data.tokenizer is not set.*\n.*--data.tokenizer.path"):
        build(folder, tokenizer=None)


def test_too_few_tokens_and_shares_out_of_range(opened, build, tmp_path):
    folder = write_litdata(tmp_path / "tokens", [[1, 2, 3]], INT32)
    with pytest.raises(ConfigError, match="3 tokens, too few"):
        opened(folder)
    with pytest.raises(ConfigError, match=r"data.validation_fraction is 1"):
        build(folder, validation_fraction=1.0)


def test_pretraining_on_such_a_folder_names_the_data_module(tmp_path, capsys):
    folder = write_litdata(tmp_path / "tokens", DOCUMENTS, INT32)
    assert main(["check", "--config", "quickstart", f"--data.source={folder}"]) == 2
    assert "--config data/litdata" in capsys.readouterr().err
