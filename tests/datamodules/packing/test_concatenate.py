import json
import pickle
import shutil
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from core.token_loader import TokenLoader
from datamodules.packing.concatenate import ConcatenatedBatches as TokenBatches
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.token_shards import TokenShards

LENGTHS = [1, 40, 3, 17, 90, 2, 5, 61, 8, 30, 44, 12, 77, 1, 1, 25, 10, 50, 33, 91]  # 601 tokens


def write(folder, lengths=LENGTHS, shard_bytes=400):
    """A stream in which every token equals its own position."""
    ends = np.cumsum(lengths)
    documents = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    TokenShards(shard_bytes).write(documents, folder, vocab_size=1 << 17)
    return TokenStore(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = write(tmp_path_factory.mktemp("tokens"))
    assert len(list(store.folder.glob("*.bin"))) > 3
    return store


def batches(store, **options):
    return TokenBatches(store, **{"sequence_length": 12, "batch_size": 3, **options})


def first_tokens(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def rows(data):
    return torch.cat([batch["input_ids"][:, 0] for batch in data]).tolist()


# The stream ---------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 600), length=st.integers(1, 700))
def test_any_range_is_read_across_chunk_ends(store, start, length):
    expected = np.arange(start, min(start + length, 601))
    assert np.array_equal(store.read(start, start + length), expected)
    window = store.windows(np.array([start]), length)[0]
    assert np.array_equal(window[: len(expected)], expected)
    assert (window[len(expected) :] == -1).all()


def test_documents_are_found_again(store):
    assert np.array_equal(store.document_starts(), np.cumsum([0, *LENGTHS[:-1]]))


def test_tokens_are_counted(store):
    assert store.counts(700).tolist() == [1] * 601 + [0] * 99


def test_a_spawned_process_reads_the_same(store):
    copy = pickle.loads(pickle.dumps(store))
    assert np.array_equal(copy.read(0, 601), store.read(0, 601))
    assert len(pickle.dumps(store)) < 500  # its path, not the tokens


# An epoch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shard_bytes", [50, 400, 1000, 1 << 20])
def test_an_epoch_reads_every_token_once_and_the_next_one_is_its_label(tmp_path, shard_bytes, shuffle):
    store = write(tmp_path, shard_bytes=shard_bytes)
    data = list(batches(store, shuffle=shuffle, batch_size=5))
    inputs = torch.cat([batch["input_ids"] for batch in data])
    labels = torch.cat([batch["labels"] for batch in data])
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert sorted(inputs.flatten().tolist()) == list(range(600))
    assert torch.equal(labels, inputs + 1)


def test_without_shuffling_rows_come_in_the_streams_order(store):
    assert rows(batches(store, batch_size=5)) == list(range(0, 600, 12))


def test_orders_follow_seed_and_epoch(store):
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        data = batches(store, batch_size=5, shuffle=True, seed=seed)
        data.epoch = epoch
        orders.append(rows(data))
        assert sorted(orders[-1]) == list(range(0, 600, 12))
        assert orders[-1] == rows(data)
    assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_and_workers_only_slice_the_same_global_batches(store, world_size, workers, pad):
    options = {"shuffle": not pad, "seed": 3, "pad": pad}
    expected = list(batches(store, batch_size=6, **options))
    ranks = [
        list(
            TokenLoader(
                batches(store, batch_size=6 // world_size, rank=rank, world_size=world_size, **options),
                workers,
            )
        )
        for rank in range(world_size)
    ]
    assert len(expected) == (9 if pad else 8)
    for name in ("input_ids", "labels"):
        joined = [torch.cat([batch[name] for batch in parts]) for parts in zip(*ranks, strict=True)]
        assert torch.equal(torch.stack(joined), torch.stack([batch[name] for batch in expected]))


def test_training_leaves_out_what_fills_no_global_batch(store):
    assert len(batches(store, batch_size=7)) == len(list(batches(store, batch_size=7))) == 7  # 50 rows
    assert len(batches(store, sequence_length=601)) == 0
    assert batches(store, sequence_length=600).rows == 1


@pytest.mark.parametrize("sequence_length", [7, 12, 599, 600, 601, 1000])
def test_validation_counts_every_label_once_and_pads_the_rest(store, sequence_length):
    seen, lengths = [], set()
    for rank in range(2):
        data = batches(
            store, sequence_length=sequence_length, batch_size=4, rank=rank, world_size=2, pad=True
        )
        lengths.add(len(data))
        for batch in data:
            assert batch["input_ids"].shape == batch["labels"].shape == (4, sequence_length)
            assert batch["input_ids"].min() >= 0
            counted = batch["labels"] != -100
            assert torch.equal(batch["labels"][counted], batch["input_ids"][counted] + 1)
            seen += batch["labels"][counted].tolist()
    assert sorted(seen) == list(range(1, 601))
    assert lengths == {-(-600 // (sequence_length * 8))}


def test_reading_leaves_torchs_random_generator_alone(store):
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(TokenLoader(batches(store, shuffle=True), workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_may_be_spawned(store):
    context = get_context("spawn")
    loader = torch.utils.data.DataLoader(
        batches(store), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    assert first_tokens(loader) == first_tokens(batches(store))


# The position -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_continues_at_the_batch_that_would_have_come(store, workers):
    whole = TokenLoader(batches(store, shuffle=True), workers)
    epochs = [first_tokens(whole) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    for taken in (0, 1, 9, 15, 16):
        loader = TokenLoader(batches(store, shuffle=True), workers)
        list(loader)
        iterator = iter(loader)
        start = [next(iterator)["input_ids"][:, 0].tolist() for _ in range(taken)]
        state = json.loads(json.dumps(loader.state_dict()))
        assert start == epochs[1][:taken]
        resumed = TokenLoader(batches(store, shuffle=True), 2 - workers)
        resumed.load_state_dict(state)
        assert len(resumed) == 16
        rest = epochs[1][taken:] if taken < 16 else []
        assert first_tokens(resumed) == (rest or epochs[2])
        if rest:
            assert first_tokens(resumed) == epochs[2]


def test_a_state_holds_for_other_ranks_with_the_same_global_batch(store):
    one = TokenLoader(batches(store, batch_size=6, shuffle=True))
    iterator = iter(one)
    for _ in range(3):
        next(iterator)
    state = one.state_dict()
    assert (state["epoch"], state["rows"]) == (0, 18)
    expected = [batch["input_ids"] for batch in iterator]
    parts = []
    for rank in range(3):
        loader = TokenLoader(batches(store, batch_size=2, rank=rank, world_size=3, shuffle=True))
        loader.load_state_dict(state)
        parts.append([batch["input_ids"] for batch in loader])
    assert torch.equal(torch.stack([torch.cat(p) for p in zip(*parts, strict=True)]), torch.stack(expected))


def test_a_pass_that_is_broken_off_begins_again(store):
    loader = TokenLoader(batches(store, shuffle=True))
    next(iter(loader))
    assert first_tokens(loader) == first_tokens(batches(store, shuffle=True))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sequence_length": 10}, "sequence_length: 12 then, 10 now"),
        ({"batch_size": 4}, "global_batch: 3 then, 4 now"),
        ({"seed": 5}, "seed: 0 then, 5 now"),
        ({"shuffle": False}, "shuffle: True then, False now"),
    ],
)
def test_within_an_epoch_another_order_is_refused(store, change, line):
    loader = TokenLoader(batches(store, shuffle=True))
    iterator = iter(loader)
    next(iterator)
    other = TokenLoader(batches(store, **{"shuffle": True, **change}))
    with pytest.raises(ConfigError, match=line) as caught:
        other.load_state_dict(loader.state_dict())
    assert len(str(caught.value).splitlines()) <= 10
    list(iterator)
    other.load_state_dict(loader.state_dict())  # between epochs anything may change
    assert other.state_dict()["epoch"] == 1


# Damage -------------------------------------------------------------------------------------------------


def _cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def _index(change):
    def apply(path):
        index = json.loads((path.parent / "index.json").read_text())
        change(index)
        (path.parent / "index.json").write_text(json.dumps(index))

    return apply


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (lambda path: (path.parent / "index.json").unlink(), "index.json", "No such file"),
        (lambda path: _cut(path.parent / "index.json"), "index.json", "JSONDecodeError"),
        (_index(lambda index: index.pop("config")), "index.json", "config"),
        (_index(lambda index: index["chunks"].clear()), "index.json", "no chunks"),
        (_index(lambda index: index["config"].update(data_format=["jpeg"])), "index.json", "jpeg"),
        (_index(lambda index: index["chunks"][1].update(chunk_size=7)), "chunk-0-1.bin", "header"),
        (lambda path: path.unlink(), "chunk-0-1.bin", "No such file"),
        (lambda path: path.write_bytes(b""), "chunk-0-1.bin", "empty"),
        (_cut, "chunk-0-1.bin", "bytes, index.json says"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "chunk-0-1.bin", "header"),
    ],
)
def test_damage_is_named(store, tmp_path, damage, file, reason):
    folder = tmp_path / "copy"
    shutil.copytree(store.folder, folder)
    damage(folder / "chunk-0-1.bin")
    with pytest.raises(ConfigError, match=reason) as caught:
        TokenStore(folder)
    assert str(folder / file) in str(caught.value)
