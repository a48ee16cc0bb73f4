"""Records of lines, or spans of sentences: which is in how many places, and where first; sorted on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.preparation.duplicates.spilled_records import SpilledRecords

KEY = np.dtype("<u8")
RECORD = np.dtype([("line", KEY), ("document", KEY), ("number", "<u4")])
"""A line's hash, that of the first document that has it, and the number of documents that do."""

CHUNK = 1 << 19
"""Records that are held at a time. A line has one record in each chunk, however often it occurs: no file of sorted
records is filled by one line."""


class Removed(NamedTuple):
    """Lines that are removed.

    Attributes:
        lines: Hashes, ascending.
        keepers: Hash of the document that keeps each.
    """

    lines: np.ndarray
    keepers: np.ndarray


def keys(texts: Iterable[str]) -> np.ndarray:
    """Returns 64 bits of BLAKE2b of each text."""
    digests = [blake2b(text.encode(), digest_size=KEY.itemsize).digest() for text in texts]
    return np.frombuffer(b"".join(digests), KEY)


def without(parts: Sequence[str], chosen: Sequence[bool], order: Callable[[str], Any] = len) -> str:
    """Returns a text without some of its lines.

    Args:
        parts: Lines, with what is between each two.
        chosen: Whether a line is left out.
        order: Of what is between two lines that stay, the greatest in this order does.
    """
    left, gap = list[str](), ""
    for place, gone in enumerate(chosen):
        if place:
            gap = max(gap, parts[2 * place - 1], key=order)
        if not gone:
            left += [gap, parts[2 * place]] if left else [parts[2 * place]]
            gap = ""
    return "".join(left)


def write_records(documents: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], path: Path) -> None:
    """Writes the lines of documents, counted by chunks.

    Args:
        documents: Of some documents at a time: hashes of their lines, those of one document different; the number
            of lines of each document; the hash of each document.
        path: The file.
    """
    held: list[np.ndarray] = []
    with path.open("wb") as file:
        for lines, numbers, names in documents:
            records = np.empty(len(lines), RECORD)
            records["line"], records["document"], records["number"] = lines, np.repeat(names, numbers), 1
            held.append(records)
            if sum(map(len, held)) >= CHUNK:
                _combined(np.concatenate(held)).tofile(file)
                held = []
        if held:
            _combined(np.concatenate(held)).tofile(file)


def write_removed(findings: Sequence[Path], most: int, scratch: Path, conclusion: Path) -> None:
    """Writes the lines that are in more than `most` documents, for :func:`read_removed`.

    Args:
        findings: What :func:`write_records` wrote, in the order of the source.
        most: Number of documents.
        scratch: An empty folder for what does not fit into memory.
        conclusion: The file.
    """
    expected = sum(path.stat().st_size for path in findings) // RECORD.itemsize
    spilled = SpilledRecords(scratch / "lines", RECORD, expected)
    for records in _read(findings):
        spilled.add(records, records["line"])
    keepers = scratch / "keepers"
    with conclusion.open("wb") as file, keepers.open("wb") as behind:
        for records in spilled.partitions():
            found = _combined(records)
            found = found[found["number"] > most]
            found["line"].tofile(file)
            found["document"].tofile(behind)
    with conclusion.open("ab") as file, keepers.open("rb") as behind:
        shutil.copyfileobj(behind, file)


def read_removed(conclusion: Path) -> Removed:
    """Maps what :func:`write_removed` wrote; it stays on disk."""
    number = conclusion.stat().st_size // (2 * KEY.itemsize)
    if not number:  # an empty file cannot be mapped
        return Removed(np.empty(0, KEY), np.empty(0, KEY))
    both = np.asarray(np.memmap(conclusion, KEY, mode="r"))
    return Removed(both[:number], both[number:])


def _read(findings: Sequence[Path]) -> Iterator[np.ndarray]:
    for path in findings:
        with path.open("rb") as file:
            while len(records := np.fromfile(file, RECORD, CHUNK)):
                yield records


def _combined(records: np.ndarray) -> np.ndarray:
    """Returns one record for each line, ascending: the first document, and the sum of the numbers up to 2**32 - 1."""
    order = np.argsort(records["line"], kind="stable")
    lines = records["line"][order]
    begins = np.flatnonzero(np.diff(lines, prepend=~lines[:1]))
    found = records[order[begins]]
    if len(found):
        numbers = np.add.reduceat(records["number"][order].astype(np.int64), begins)
        found["number"] = np.minimum(numbers, (1 << 32) - 1)
    return found
