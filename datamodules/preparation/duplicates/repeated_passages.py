"""Finds all passages of some length that are in the noted texts more than once; sorted on disk.

A passage of at least `length` bytes is there twice if and only if each window of `length` bytes in it is: the repeated windows, put
together, are the repeated passages. Only windows around a fingerprint that is there twice can be repeated; these are hashed
and sorted, and all others never are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.preparation.duplicates.duplicate_filter import HASH, prefixes
from datamodules.preparation.duplicates.noted_texts import NotedBlock, read_noted
from datamodules.preparation.duplicates.spilled_records import SpilledRecords
from datamodules.preparation.duplicates.window_hashes import window_hashes, window_starts

CHUNK = 1 << 19
"""Records of equal keys that are looked at a time."""

PIECE = 1 << 20
"""Bytes of text whose windows are hashed at a time."""

_FINGERPRINT = np.dtype([("hash", "<u8"), ("place", "<u8")])
_WINDOW = np.dtype([("hash", "<u8"), ("second", "<u8"), ("place", "<u8")])
_CUT = np.dtype([("document", HASH), ("place", "<u8"), ("begin", "<i8"), ("end", "<i8")])


class Cuts(NamedTuple):
    """What is cut out of documents.

    Attributes:
        documents: Identity of the document of each cut, ascending.
        ranges: Its first byte, and the one behind it; those of a document ascending and apart.
    """

    documents: np.ndarray
    ranges: np.ndarray


def write_cuts(
    findings: Sequence[Path], length: int, keep_first: bool, scratch: Path, conclusion: Path
) -> None:
    """Writes what is repeated in which documents, for :func:`read_cuts`.

    Args:
        findings: Noted texts, in the order of the source.
        length: Least bytes of a passage.
        keep_first: Whether a passage stays where it is for the first time.
        scratch: An empty folder for what does not fit into memory.
        conclusion: The file.
    """
    total = documents = 0
    for block in read_noted(findings):
        total, documents = block.begin + int(block.ends[-1]), documents + len(block.ends)
    candidates = _places(
        _repeated(_fingerprints(findings, scratch / "fingerprints"), False), scratch / "candidates", total
    )
    windows = _windows(findings, candidates, length, total, scratch / "windows")
    gone = _places(_repeated(windows, keep_first), scratch / "gone", total)
    cuts = SpilledRecords(scratch / "cuts", _CUT, 2 * documents)
    for block, places in _by_block(gone, read_noted(findings)):
        found = _cuts(block, places, length)
        cuts.add(found, prefixes(found["document"]))
    _write(cuts, scratch / "ranges", conclusion)


def read_cuts(conclusion: Path) -> Cuts:
    """Maps what :func:`write_cuts` wrote; it stays on disk."""
    number = conclusion.stat().st_size // (HASH.itemsize + 16)
    if not number:  # an empty file cannot be mapped
        return Cuts(np.empty(0, HASH), np.empty((0, 2), np.int64))
    documents = np.memmap(conclusion, HASH, "r", 0, (number,))
    ranges = np.memmap(conclusion, "<i8", "r", number * HASH.itemsize, (number, 2))
    return Cuts(np.asarray(documents), np.asarray(ranges))


def _fingerprints(findings: Sequence[Path], folder: Path) -> SpilledRecords:
    number = sum(len(block.places) for block in read_noted(findings))
    spilled = SpilledRecords(folder, _FINGERPRINT, number)
    for block in read_noted(findings):
        records = np.empty(len(block.places), _FINGERPRINT)
        records["hash"], records["place"] = block.hashes, block.begin + block.places
        spilled.add(records, block.hashes)
    return spilled


def _repeated(spilled: SpilledRecords, keep_first: bool) -> Iterator[np.ndarray]:
    """Yields the places of the records whose hash is that of an earlier record, and unless they stay those of the first ones."""
    for pieces in spilled.pieces(CHUNK):
        firsts = np.empty(0, spilled.dtype)
        for records in pieces:
            both = np.concatenate([firsts, records])
            both = both[np.argsort(both["hash"], kind="stable")]
            new = np.ones(len(both), np.bool_)
            new[1:] = both["hash"][1:] != both["hash"][:-1]
            if spilled.dtype == _WINDOW:
                new[1:] |= both["second"][1:] != both["second"][:-1]
            firsts = both[new]
            yield both["place"][~new]
            if not keep_first:
                yield both["place"][:-1][new[:-1] & ~new[1:]]


def _places(found: Iterator[np.ndarray], folder: Path, total: int) -> SpilledRecords:
    """Returns places by their order; each file has few enough even if every byte of the text is one."""
    places = SpilledRecords(folder, np.dtype("<u8"), total, total or 1)
    for some in found:
        places.add(some, some)
    return places


def _by_block(
    places: SpilledRecords, blocks: Iterator[NotedBlock]
) -> Iterator[tuple[NotedBlock, np.ndarray]]:
    """Yields each block with those of the places that are in it: in its text, ascending, each once."""
    partitions, held = places.partitions(), np.empty(0, np.uint64)
    for block in blocks:
        end, found = block.begin + int(block.ends[-1]), [held[:0]]
        while True:
            number = int(np.searchsorted(held, np.uint64(end)))
            found.append(held[:number])
            held = held[number:]
            if len(held) or (more := next(partitions, None)) is None:
                break
            more.sort()  # several times as fast as np.unique
            held = more[np.diff(more, prepend=~more[:1]) != 0]
        yield block, np.concatenate(found).astype(np.int64) - block.begin


def _windows(
    findings: Sequence[Path], candidates: SpilledRecords, length: int, total: int, folder: Path
) -> SpilledRecords:
    """Returns the windows around fingerprints that are there twice, by their hash."""
    windows = SpilledRecords(folder, _WINDOW, total)
    for block, places in _by_block(candidates, read_noted(findings)):
        if not len(places):
            continue
        text, inside = block.text(), window_starts(block.ends, length)
        for begin in range(0, len(text), PIECE):
            end = min(begin + PIECE, len(text))
            first, last = np.searchsorted(places, [begin, end + length - length // 2])
            near = _covered(places[first:last] - begin, length // 2 - length, 1, end - begin)
            starts = np.flatnonzero(near & inside[begin:end])
            if len(starts):
                records = _hashed(text[begin : end + length - 1], starts, length)
                records["place"] += np.uint64(block.begin + begin)
                windows.add(records, records["hash"])
    return windows


def _hashed(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Returns the windows that begin at `starts`, with their places in the text; only the bytes in them are hashed."""
    needed = _covered(starts, 0, length, len(text))
    at = (np.cumsum(needed, dtype=np.int32) - 1)[starts]
    some = text[needed]
    records = np.empty(len(starts), _WINDOW)
    records["hash"], records["place"] = window_hashes(some, length)[at], starts
    records["second"] = window_hashes(some, length, second=True)[at]
    return records


def _covered(places: np.ndarray, back: int, ahead: int, size: int) -> np.ndarray:
    """Returns for each of `size` bytes whether it is in the range from `back` to `ahead` of one of the places."""
    change = np.bincount(np.clip(places + back, 0, size), minlength=size + 1)
    change -= np.bincount(np.clip(places + ahead, 0, size), minlength=size + 1)
    return np.cumsum(change)[:-1] > 0


def _cuts(block: NotedBlock, places: np.ndarray, length: int) -> np.ndarray:
    """Returns what the windows at these places cover of each document; one cut of nothing for each document is first."""
    owners = np.searchsorted(block.ends, places, side="right")
    apart = (np.diff(places) > length) | (np.diff(owners) > 0)
    first = np.flatnonzero(np.concatenate([np.ones(min(len(places), 1), np.bool_), apart]))
    last = np.append(first[1:], len(places))[: len(first)] - 1
    begins = np.concatenate([[0], block.ends[:-1]])
    number = len(block.ends)
    found = np.zeros(number + len(first), _CUT)
    document = np.concatenate([np.arange(number), owners[first]])
    found["document"], found["place"] = block.identities[document], block.begin + begins[document]
    found["begin"][number:] = places[first] - begins[owners[first]]
    found["end"][number:] = places[last] + length - begins[owners[first]]
    return found


def _write(cuts: SpilledRecords, scratch: Path, conclusion: Path) -> None:
    """Writes the cuts by document. Of documents with the same identity, which cannot be told apart, those of the first count."""
    with conclusion.open("wb") as file, scratch.open("wb") as behind:
        for records in cuts.partitions():
            records = records[np.argsort(records["document"], kind="stable")]
            new = np.ones(len(records), np.bool_)
            new[1:] = records["document"][1:] != records["document"][:-1]
            place = records["place"][new][np.cumsum(new) - 1]
            records = records[(records["place"] == place) & (records["end"] > records["begin"])]
            np.ascontiguousarray(records["document"]).tofile(file)
            np.stack([records["begin"], records["end"]], axis=1).tofile(behind)
    with conclusion.open("ab") as file, scratch.open("rb") as behind:
        shutil.copyfileobj(behind, file)
