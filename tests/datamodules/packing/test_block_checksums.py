"""Every flipped bit is found when its block is first read, and every block is looked at once."""

import json
import pickle
import shutil
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from litdata import StreamingDataset, TokensLoader

from core.errors import ConfigError
from datamodules.packing.best_fit import BestFit
from datamodules.packing.block_checksums import BLOCK_BYTES, CHECKSUMS, read_sums
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.token_index import read_index
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards

rng = np.random.default_rng(0)


def write(folder, vocab_size=60_000, shard_bytes=100_000, seed=0):
    draw = np.random.default_rng(seed)
    documents = [draw.integers(0, 60_000, size) for size in draw.integers(1, 20_000, 40)]
    TokenShards(shard_bytes).write(documents, folder, vocab_size)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = write(tmp_path_factory.mktemp("tokens") / "train")
    sizes = [path.stat().st_size for path in found.glob("*.bin")]
    assert len(sizes) > 4
    assert all(size % BLOCK_BYTES for size in sizes)  # the last block of each is a short one
    return found


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def chunks(folder):
    return [folder / chunk["filename"] for chunk in json.loads((folder / "index.json").read_text())["chunks"]]


def as_zlib_has_it(folder):
    return [
        [
            zlib.crc32(path.read_bytes()[at : at + BLOCK_BYTES])
            for at in range(0, path.stat().st_size, BLOCK_BYTES)
        ]
        for path in chunks(folder)
    ]


def stored(folder):
    _, sums = read_sums(folder, [path.stat().st_size for path in chunks(folder)])
    return [of_chunk.tolist() for of_chunk in sums]


@pytest.mark.parametrize("vocab_size", [60_000, 1 << 17])
def test_written_sums_are_those_of_zlib(tmp_path, vocab_size):
    write(tmp_path, vocab_size)
    assert stored(tmp_path) == as_zlib_has_it(tmp_path)


@pytest.mark.parametrize("shard_bytes", [1, 50_000, 150_000, 1 << 30])
@pytest.mark.parametrize("earlier", [False, True])
def test_joined_sums_are_those_of_the_joined_chunks(tmp_path, shard_bytes, earlier):
    parts = [write(tmp_path / "parts" / str(n), shard_bytes=50_000, seed=n) for n in range(3)]
    if earlier:  # a preparation that an earlier version began
        (parts[1] / CHECKSUMS).unlink()
    TokenShards(shard_bytes).join(parts, tmp_path / "out")
    assert stored(tmp_path / "out") == as_zlib_has_it(tmp_path / "out")


def test_a_chunk_that_changed_before_it_was_moved_keeps_the_sums_that_it_was_written_with(tmp_path):
    part = write(tmp_path / "part")
    flip(part / "chunk-0-1.bin", 50_000)
    TokenShards(1).join([part], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"chunk-0-1.bin is damaged: bytes 49,152 to 65,535 "):
        TokenStore(tmp_path / "out").read(0, 1 << 30)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_is_found_when_its_block_is_read_and_not_before(folder, tmp_path_factory, data):
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "train")
    index = read_index(copy)
    number = data.draw(st.integers(0, len(index.names) - 1))
    path, begin = copy / index.names[number], 4 * (int(index.items[number]) + 2)
    byte = data.draw(st.integers(begin, path.stat().st_size - 1))
    block = byte // BLOCK_BYTES
    flip(path, byte, data.draw(st.integers(0, 7)))
    named = rf"{path} is damaged: bytes {block * BLOCK_BYTES:,} to "
    if block == 0:  # where documents begin is read at once
        with pytest.raises(ConfigError, match=named):
            TokenStore(copy)
        return
    store = TokenStore(copy)
    before = int(index.tokens[:number].sum())
    first = before + (block * BLOCK_BYTES - begin) // 2
    last = min(first + BLOCK_BYTES // 2, before + int(index.tokens[number]))
    one = np.zeros(1, np.int64)
    store.read(0, first)
    store.read(last, len(store))
    at = data.draw(st.integers(first, last - 1))
    with pytest.raises(ConfigError, match=named):
        store.copy(at, one, one.copy())
    with pytest.raises(ConfigError, match=named):  # again, not once
        store.read(at, at + 1)
    store.copy(first - 2, one, one.copy())  # the token before, and the one before that
    with pytest.raises(ConfigError, match=named):
        store.copy(first - 1, one, one.copy())  # its label is in the block


def test_a_block_is_looked_at_once(folder, monkeypatch):
    looked = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda content: looked.append(len(content)) or crc32(content))
    store = TokenStore(folder)
    expected = [BLOCK_BYTES] * store._checks.left
    for _ in range(2):
        for at in rng.permutation(len(store)).tolist()[:3000]:
            store.read(at, at + 300)
    assert store._checks is None  # nothing is left to look at
    assert len(looked) == len(expected) + len(chunks(folder))
    assert sum(looked) == sum(path.stat().st_size for path in chunks(folder))


def test_sums_that_are_cut_while_they_are_in_use_are_named_and_no_chunk_is(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "train")
    store = TokenStore(copy)
    with open(copy / CHECKSUMS, "r+b") as file:
        file.truncate(16)
    with pytest.raises(
        ConfigError, match=rf"{CHECKSUMS} is missing or damaged: .*was cut while it was in use"
    ):
        store.read(0, len(store))


def test_a_spawned_reader_looks_for_itself(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "train")
    store = TokenStore(copy)
    store.read(0, len(store))
    there = pickle.dumps(store)
    del store  # whose checks all readers of this process share
    flip(chunks(copy)[2], 70_000)
    with pytest.raises(ConfigError, match="is damaged: bytes 65,536 to 8"):
        pickle.loads(there).read(0, 1 << 30)


def test_folders_without_sums_are_read_as_before(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "train")
    (copy / CHECKSUMS).unlink()
    assert np.array_equal(TokenStore(copy).read(0, 1 << 30), TokenStore(folder).read(0, 1 << 30))


def test_litdata_reads_the_folder_as_if_there_were_no_sums(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "train")
    (copy / CHECKSUMS).unlink()
    ours, bare = (
        np.stack(list(StreamingDataset(str(f), item_loader=TokensLoader(64)))) for f in (folder, copy)
    )
    assert np.array_equal(ours, bare)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-4], "bytes, the chunks' blocks need"),
        (lambda content: content + b"1234", "bytes, the chunks' blocks need"),
        (lambda content: b"", "it has 0 bytes"),
        (lambda content: b"x" + content[1:], "does not begin as"),
        (lambda content: content[:8] + b"\1" + content[9:], "does not begin as"),
    ],
)
def test_damaged_sums_are_refused(folder, tmp_path, change, reason):
    copy = shutil.copytree(folder, tmp_path / "train")
    (copy / CHECKSUMS).write_bytes(change((copy / CHECKSUMS).read_bytes()))
    with pytest.raises(ConfigError, match=f"{CHECKSUMS} is missing or damaged: .*{reason}"):
        TokenStore(copy)


@pytest.mark.parametrize("packing", [Concatenate(), Concatenate(mask_documents=True), BestFit()])
def test_all_ways_of_packing_find_it(folder, tmp_path, packing):
    copy = shutil.copytree(folder, tmp_path / "train")
    flip(chunks(copy)[3], 90_000, 7)
    batches = packing.batches(copy, sequence_length=64, batch_size=2, shuffle=True)
    with pytest.raises(ConfigError, match=r"bytes 81,920 to 9.*\n.*verify-data .*\n.*prepare the text again"):
        list(batches)
