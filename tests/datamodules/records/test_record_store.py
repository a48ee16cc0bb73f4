"""Encoded records come back as they were written; a file that is cut while it is open is named."""

import mmap
import os
import sys

import pytest

from conformance.runs import in_subprocess
from core.errors import ConfigError
from datamodules.records.record_store import Encoded, RecordStore, RecordWriter

RECORDS = 4 * mmap.PAGESIZE
"""Of two ids, one number and a byte of note: each file has four pages or more, of which two stay."""


def written(folder):
    writer = RecordWriter(folder / "train", sequences=1, values=1, notes=True)
    for number in range(RECORDS):
        writer.add(Encoded([([number, 1], [-100, number % 7])], [number / 2], "abc"[number % 3]))
    writer.close()
    return folder / "train"


def test_what_is_written_is_read(tmp_path):
    store = RecordStore(written(tmp_path))
    for number in (0, 1, RECORDS - 1):
        ids, labels = store.sequence(number, 0, 10)
        assert (ids.tolist(), labels.tolist()) == ([number, 1], [-100, number % 7])
        assert store.sequence(number, 0, 1, keep_end=True)[0].tolist() == [1]
        assert store.values(number).tolist() == [number / 2]
        assert store.note(number) == "abc"[number % 3]
    assert store.all_values().tolist() == [[number / 2] for number in range(RECORDS)]
    assert store.label_of_each().tolist() == [number % 7 for number in range(RECORDS)]


def test_the_end_of_a_long_record_is_read_without_its_middle(tmp_path, monkeypatch):
    writer = RecordWriter(tmp_path / "train", sequences=1, values=0, notes=False)
    writer.add(Encoded([([7, 8, 9, 10, 11], [0, 1, 2, 3, 4])]))
    writer.close()
    store, reads = RecordStore(tmp_path / "train"), []
    read = type(store._ids).read
    monkeypatch.setattr(
        type(store._ids),
        "read",
        lambda self, begin, end: reads.append((begin, end)) or read(self, begin, end),
    )
    ids, labels = store.sequence(0, 0, 3, keep_end=True)
    assert (ids.tolist(), labels.tolist()) == ([7, 8, 11], [0, 1, 4])
    assert set(reads) == {(0, 2), (4, 5)}


READS = {
    "ids": lambda store, record: store.sequence(record, 0, 10),
    "labels": lambda store, record: store.sequence(record, 0, 1, keep_end=True),
    "values": lambda store, record: store.values(record),
    "notes": lambda store, record: store.note(record),
    "note_ends": lambda store, record: store.note(record),
}
WHOLE = {"labels": lambda store, _: store.label_of_each(), "values": lambda store, _: store.all_values()}


def cut_while_open(folder, name):
    store, reads = RecordStore(folder), [read[name] for read in (READS, WHOLE) if name in read]
    for read in reads:
        read(store, RECORDS - 1)  # what was read once may be lost, too
    os.truncate(folder / f"{name}.bin", 2 * mmap.PAGESIZE)
    for read in reads:
        with pytest.raises(ConfigError, match="cut while it was in use") as caught:
            read(store, RECORDS - 1)
        assert f"{folder / name}.bin is damaged" in str(caught.value)
        assert f"Delete {folder.parent} and run again" in str(caught.value)
    reads[0](store, 0)


def test_what_is_cut_within_a_page_is_named_too(tmp_path):
    """The system gives zeros for the rest of the page in which the file ends."""
    store = RecordStore(written(tmp_path))
    cut = 2 * mmap.PAGESIZE + 24
    os.truncate(store.folder / "ids.bin", cut)
    last = cut // 8 - 1
    assert store.sequence(last, 0, 10)[0].tolist() == [last, 1]
    with pytest.raises(ConfigError, match="cut while it was in use"):
        store.sequence(last + 1, 0, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no MADV_POPULATE_READ")
@pytest.mark.parametrize("name", READS)
def test_what_is_cut_while_it_is_open_is_named(tmp_path, name):
    in_subprocess(cut_while_open, written(tmp_path), name)  # which the system ends if it touches lost bytes
