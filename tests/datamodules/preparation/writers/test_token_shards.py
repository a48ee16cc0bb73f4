import json
import os
import shutil
import tracemalloc
import warnings
from itertools import pairwise

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader
from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING
from litdata.streaming.writer import BinaryWriter

from core.errors import ConfigError
from datamodules.packing.block_checksums import CHECKSUMS
from datamodules.packing.token_index import DTYPES
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.corpus import contents

rng = np.random.default_rng(0)
DOCUMENTS = [rng.integers(0, 60_000, length).tolist() for length in rng.integers(1, 400, 60)]
TOKENS = sum(len(ids) for ids in DOCUMENTS)


@pytest.mark.parametrize("shard_bytes", [600, 4000, 1 << 20])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_what_was_written_is_read_by_us_and_by_litdata(tmp_path, vocab_size, dtype, shard_bytes):
    assert TokenShards(shard_bytes).write(iter(DOCUMENTS), tmp_path, vocab_size) == TOKENS
    store = TokenStore(tmp_path)
    stream = store.read(0, TOKENS)
    assert len(store) == TOKENS
    assert stream.dtype == dtype
    assert np.array_equal(stream, np.concatenate(DOCUMENTS))
    assert np.array_equal(store.document_starts(), np.cumsum([0, *map(len, DOCUMENTS[:-1])]))
    # litdata cuts each chunk into blocks and drops the chunk's tail
    expected, start = [], 0
    for chunk in json.loads((tmp_path / "index.json").read_text())["chunks"]:
        blocks = chunk["dim"] // 16
        expected.append(stream[start : start + blocks * 16].reshape(blocks, 16))
        start += chunk["dim"]
    assert start == TOKENS
    read = StreamingDataset(str(tmp_path), item_loader=TokensLoader(block_size=16))
    assert np.array_equal(np.stack(list(read)), np.concatenate(expected))


def test_chunks_have_about_the_size_asked_for(tmp_path):
    TokenShards(10_000).write(DOCUMENTS, tmp_path, 60_000)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.bin")]
    assert len(sizes) > 2
    assert max(sizes) < 11_000
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "index.json"


def test_a_large_chunk_is_written_and_joined_without_being_held_in_memory(tmp_path):
    documents = (np.full(1 << 19, number, np.uint16) for number in range(40))  # of 1 MiB
    tracemalloc.start()
    TokenShards().write(documents, tmp_path / "part", 1 << 16)
    shutil.copytree(tmp_path / "part", tmp_path / "other")
    TokenShards().join([tmp_path / "part", tmp_path / "other"], tmp_path / "out")
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()
    [chunk] = json.loads((tmp_path / "out" / "index.json").read_text())["chunks"]
    assert chunk["chunk_bytes"] == (80 << 20) + 4 * 82
    store = TokenStore(tmp_path / "out")
    assert [store.read(at << 19, (at << 19) + 1).item() for at in range(80)] == [*range(40), *range(40)]


def test_the_largest_ids_survive(tmp_path):
    TokenShards().write([[0, 65_535]], tmp_path / "a", 1 << 16)
    TokenShards().write([[0, 70_000, (1 << 32) - 1]], tmp_path / "b", 1 << 32)
    assert TokenStore(tmp_path / "a").read(0, 9).tolist() == [0, 65_535]
    assert TokenStore(tmp_path / "b").read(0, 9).tolist() == [0, 70_000, (1 << 32) - 1]


def test_a_long_document_makes_a_long_chunk_without_a_warning(tmp_path, recwarn):
    TokenShards(100).write([list(range(1000)), [5]], tmp_path, 1 << 16)
    assert TokenStore(tmp_path).read(0, 2000).tolist() == [*range(1000), 5]
    assert [warning for warning in recwarn if "larger than" in str(warning.message)] == []


@pytest.mark.timeout(60)
def test_the_bytes_do_not_depend_on_time_or_rank(tmp_path, monkeypatch):
    TokenShards(4000).write(DOCUMENTS, tmp_path / "a", 60_000)
    for name, value in {"RANK": "3", "GLOBAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATA_OPTIMIZER_GLOBAL_RANK", "2")
    TokenShards(4000).write(DOCUMENTS, tmp_path / "b", 60_000)
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / side).iterdir()} for side in "ab")
    assert a == b


def test_nothing_to_write_and_sizes_out_of_range(tmp_path):
    with pytest.raises(ConfigError, match="no document"):
        TokenShards().write([], tmp_path, 300)
    for size in (0, 1 << 31):
        with pytest.raises(ConfigError, match=f"shard_bytes is {size}"):
            TokenShards(size)


def test_litdatas_names_of_the_types_are_what_we_take_them_for():
    for name, dtype in DTYPES.items():
        serializer, _, number = name.partition(":")
        if serializer == "no_header_tensor":
            theirs = np.dtype(str(_TORCH_DTYPES_MAPPING[int(number)]).removeprefix("torch."))
        else:
            theirs = _NUMPY_DTYPES_MAPPING[int(number)]
        assert theirs == np.dtype(dtype if theirs != np.int32 else "int32")
        assert theirs.itemsize == np.dtype(dtype).itemsize


# Joining ------------------------------------------------------------------------------------------------

PIECES = [[3, 5], [40], [1] * 9, [300, 2], [7], [120, 120, 120], [2, 2], [90]]
"""Lengths of the documents of each piece."""


@pytest.fixture
def parts(tmp_path):
    first, folders = 0, []
    for number, lengths in enumerate(PIECES):
        documents = []
        for length in lengths:
            documents.append(range(first, first + length))
            first += length
        folders.append(tmp_path / "parts" / str(number))
        TokenShards(400).write(documents, folders[-1], 60_000)
    return folders


def test_small_pieces_are_joined_to_shards_of_the_size_asked_for(parts, tmp_path):
    TokenShards(400).join(parts, tmp_path / "out")
    store = TokenStore(tmp_path / "out")
    assert store.read(0, 10_000).tolist() == [*range(len(store))]
    lengths = [length for piece in PIECES for length in piece]
    assert np.diff([*store.document_starts(), len(store)]).tolist() == lengths
    index = json.loads((tmp_path / "out" / "index.json").read_text())["chunks"]
    paths = [tmp_path / "out" / chunk["filename"] for chunk in index]
    sizes = [path.stat().st_size for path in paths]
    assert [chunk["chunk_bytes"] for chunk in index] == sizes
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "index.json",
        CHECKSUMS,
        *(p.name for p in paths),
    }
    content = [size - 4 * (chunk["chunk_size"] + 2) for size, chunk in zip(sizes, index, strict=True)]
    assert content == [2 * chunk["dim"] for chunk in index]
    for (one, other), (a, b) in zip(pairwise(content), pairwise(index), strict=True):
        assert one + other + 4 * (a["chunk_size"] + b["chunk_size"] + 2) > 400
    assert len(sizes) < len(PIECES)
    assert sorted(sizes)[-2] <= 400  # 300 tokens of 2 bytes take more


def test_joining_goes_on_wherever_it_was_interrupted(parts, tmp_path, monkeypatch):
    shutil.copytree(tmp_path / "parts", tmp_path / "kept")
    moved = TokenShards(400).join(parts, tmp_path / "out")
    assert not list((tmp_path / "parts").rglob("*.bin"))
    expected = contents(tmp_path / "out")
    steps, whole = iter(()), False
    calls = {name: getattr(os, name) for name in ("replace", "fsync", "unlink")}

    def stopping(name):
        def call(*arguments, **more):
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return calls[name](*arguments, **more)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, stopping(name))
    stops = 0
    while not whole:
        stops += 1
        steps = iter(range(1000))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "parts", dirs_exist_ok=True)
        steps = iter(range(stops))
        try:
            TokenShards(400).join(parts, tmp_path / "out")
            whole = True
        except KeyboardInterrupt:
            steps = iter(range(1000))
            assert TokenShards(400).join(parts, tmp_path / "out") == moved
        found = {name: content for name, content in contents(tmp_path / "out").items() if ".tmp" not in name}
        assert found == expected  # prepare deletes temporary files when it goes on
    assert stops > 15


@pytest.mark.parametrize("vocab_size", [60_000, 1 << 17])
@pytest.mark.parametrize("shard_bytes", [1, 600, 777, 4000, 1 << 20])
def test_the_files_are_those_of_litdatas_writer(tmp_path, vocab_size, shard_bytes):
    class Writer(BinaryWriter):
        rank = 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = Writer(str(tmp_path / "theirs"), chunk_bytes=shard_bytes, item_loader=TokensLoader())
        for index, ids in enumerate(DOCUMENTS):
            theirs.add_item(index, np.asarray(ids, np.uint16 if vocab_size <= 1 << 16 else np.uint32))
        theirs.done()
    (tmp_path / "theirs" / "0.index.json").rename(tmp_path / "theirs" / "index.json")
    TokenShards(shard_bytes).write(DOCUMENTS, tmp_path / "ours", vocab_size)
    (tmp_path / "ours" / CHECKSUMS).unlink()  # litdata has none
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
