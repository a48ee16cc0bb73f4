import json
import mmap
import os
import pickle
import resource
import shutil
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.runs import in_subprocess
from core.errors import ConfigError
from datamodules.packing import local_chunks
from datamodules.packing.block_checksums import CHECKSUMS
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.token_store import TokenStore, part_of
from datamodules.preparation.writers.token_shards import TokenShards
from datamodules.remote.litdata_folder import open_litdata
from tests.support.positions import LENGTHS, write_positions


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = write_positions(tmp_path_factory.mktemp("tokens"))
    assert len(list(store.folder.glob("*.bin"))) > 3
    return store


# The stream ---------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 600), length=st.integers(1, 700))
def test_any_range_is_read_across_chunk_ends(store, start, length):
    expected = np.arange(start, min(start + length, 601))
    assert np.array_equal(store.read(start, start + length), expected)
    inputs, labels = np.zeros((2, length), np.int64)
    assert store.copy(start, inputs, labels) == (start + length < 601)
    assert inputs.tolist() == [n if n < 601 else -1 for n in range(start, start + length)]
    assert labels.tolist() == [n if n < 601 else -1 for n in range(start + 1, start + length + 1)]


def test_documents_are_found_again(store):
    assert np.array_equal(store.document_starts(), np.cumsum([0, *LENGTHS[:-1]]))


def test_tokens_are_counted(store):
    assert store.counts(700).tolist() == [1] * 601 + [0] * 99


def test_a_spawned_process_reads_the_same(store):
    copy = pickle.loads(pickle.dumps(store))
    assert np.array_equal(copy.read(0, 601), store.read(0, 601))
    assert len(pickle.dumps(store)) < 500  # its path, not the tokens


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 601), length=st.integers(0, 700))
def test_document_starts_are_found_in_any_range(store, start, length):
    starts = np.cumsum([0, *LENGTHS])  # the last is the end, where nothing begins
    expected = starts[(starts >= start) & (starts < start + length)]
    assert store.starts_between(start, start + length).tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 601), length=st.integers(0, 700))
def test_parts_of_documents_are_found_in_any_range(store, start, length):
    starts = np.cumsum([0, *LENGTHS]).tolist()
    parts = [
        (max(begin, start), min(end, start + length), number, begin)
        for number, (begin, end) in enumerate(pairwise(starts))
    ]
    expected = [(number, low - begin, high - low) for low, high, number, begin in parts if high > low]
    assert store.parts_between(start, start + length) == expected


def test_documents_are_found_by_number(store):
    assert store.number_of_documents == len(LENGTHS)
    order = np.random.default_rng(0).permutation(len(LENGTHS))
    starts = np.cumsum([0, *LENGTHS])
    assert store.documents(order).tolist() == [[starts[n], LENGTHS[n]] for n in order]


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
        (lambda path: _cut(path.parent / "index.json"), "index.json", "no JSON"),
        (_index(lambda index: index.pop("config")), "index.json", "config"),
        (_index(lambda index: index["chunks"].clear()), "index.json", "no chunks"),
        (_index(lambda index: index["config"].update(data_format=["jpeg"])), "index.json", "jpeg"),
        (_index(lambda index: index["chunks"][1].update(chunk_size=7)), "chunk-0-1.bin", "header"),
        (lambda path: path.unlink(), "chunk-0-1.bin", "No such file"),
        (lambda path: path.write_bytes(b""), "chunk-0-1.bin", "has 0 bytes"),
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


def _cut_while_open(folder, path):
    stores = TokenStore(folder), TokenStore(part_of(folder, 20_000, 40_000))
    for store in stores:
        assert store.read(0, 20_000).tolist()  # what was read once may be lost, too
    os.truncate(path, 4 * mmap.PAGESIZE)
    for store in stores:
        for read in (
            lambda store=store: store.read(9000, 9010),
            lambda store=store: store.copy(9000, *np.empty((2, 10), int)),
        ):
            with pytest.raises(ConfigError, match="cut while it was in use") as caught:
                read()
            assert str(path) in str(caught.value)
    assert (folder / CHECKSUMS).exists() or len(stores[0].read(0, 1000)) == 1000


def _cut_copy(folder, cache):
    folder = open_litdata(f"local:{folder}", cache, None, None)
    path = folder / "chunk-0-0.bin"
    _cut_while_open(folder, path)
    with pytest.raises(ConfigError, match="has 16,384 bytes, not") as caught:
        TokenStore(folder).read(0, 1)
    assert "Delete it and run again" in str(caught.value)
    path.unlink()
    assert TokenStore(folder).read(9000, 9010).tolist() == [*range(9000, 9010)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no MADV_POPULATE_READ")
@pytest.mark.parametrize("kind", ["with sums", "without sums", "copy of storage"])
def test_what_is_cut_while_it_is_open_is_named(tmp_path, kind):
    """The system ends a process that touches lost bytes."""
    folder = tmp_path / "train"
    folder.mkdir()
    TokenShards().write([np.arange(50_000)], folder, 50_000)
    if kind == "without sums":
        (folder / CHECKSUMS).unlink()
    if kind == "copy of storage":
        in_subprocess(_cut_copy, folder, tmp_path / "cache")
    else:
        in_subprocess(_cut_while_open, folder, folder / "chunk-0-0.bin")


def _held(folder):
    """Returns how many of a folder's files this process has open, without the one of checksums."""
    open_files = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(str(folder) in path and path.endswith(".bin") for path in open_files)


def _limit(above):
    """Lets this process have so many more open files at most than it may have at first; returns the latter."""
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 8
    assert soft < 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft + above))
    return soft


def _reads(folders, above, most=None):
    """Reads folders in turn with a limit, then lets go of one after the other."""
    soft = _limit(above)
    stores = {folder: TokenStore(folder) for folder in folders}
    for at in np.random.default_rng(0).permutation(601).tolist():
        for store in stores.values():
            assert store.read(at, at + 3).tolist() == [*range(at, min(at + 3, 601))]
    assert sum(map(_held, folders)) <= (most or soft // 4)
    store = None
    for folder in folders:
        assert stores[folder].document_starts().tolist() == [*range(0, 601, 2)]
        assert 0 < _held(folder) <= (most or soft // 4)
        del stores[folder]
        assert _held(folder) == 0


@pytest.mark.slow  # by default a folder with few chunks is tried, below
def test_more_chunks_than_a_process_may_have_open(tmp_path):
    """Each mapped chunk is an open file: those that were read last stay open, as many as the limit allows, of all folders."""
    folders = [tmp_path / "one", tmp_path / "other"]
    chunks = [len(write_positions(folder, [2] * 300 + [1], shard_bytes=1)._chunks) for folder in folders]
    assert chunks == [301, 301]
    # Not forks of this process, in which other tests may have left files open.
    in_subprocess(_reads, folders[:1], 5 * 301, 301)
    in_subprocess(_reads, folders, 0)


def test_chunks_of_a_large_folder_are_opened_when_they_are_read(tmp_path):
    write_positions(tmp_path, [1] * 1100, shard_bytes=1)
    (tmp_path / "chunk-0-700.bin").unlink()
    store = TokenStore(tmp_path)
    assert _held(tmp_path) == 0
    assert store.read(500, 503).tolist() == [500, 501, 502]
    assert _held(tmp_path) == 3
    with pytest.raises(ConfigError, match=r"chunk-0-700.bin is missing"):
        store.read(700, 701)


def test_a_folder_is_opened_once_for_all_who_read_it(store, tmp_path, monkeypatch):
    folder, read = tmp_path / "copy", []
    shutil.copytree(store.folder, folder)
    index = local_chunks.read_index
    monkeypatch.setattr(local_chunks, "read_index", lambda path: read.append(path) or index(path))
    training = Concatenate().batches(folder, sequence_length=8, batch_size=1)
    part = TokenStore(part_of(folder, 300, 601))
    assert read == [folder]
    files = _held(folder)
    assert part.read(0, 301).tolist() == [*range(300, 601)] == training.store.read(300, 601).tolist()
    assert _held(folder) == files
    shutil.copytree(folder, tmp_path / "again")  # prepared again while the other is read
    shutil.rmtree(folder)
    (tmp_path / "again").rename(folder)
    assert TokenStore(folder).read(0, 601).tolist() == [*range(601)]
    assert read == [folder, folder]
