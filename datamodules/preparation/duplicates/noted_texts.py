"""Files of the texts that repeated passages are looked for in, with fingerprints of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from datamodules.preparation.duplicates.duplicate_filter import HASH


class NotedBlock(NamedTuple):
    """Some documents of a file.

    Attributes:
        begin: Bytes of text before it, in this file and the earlier ones.
        identities: Hash of id and text of each document.
        ends: Where each document ends in the text.
        hashes: Hash of each fingerprint.
        places: Where it begins in the text, ascending.
        path: The file.
        at: Byte of the file at which the text begins.
    """

    begin: int
    identities: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    places: np.ndarray
    path: Path
    at: int

    def text(self) -> np.ndarray:
        """Maps the text, uint8."""
        return np.asarray(np.memmap(self.path, np.uint8, "r", self.at, (int(self.ends[-1]),)))


def write_noted(
    file: BinaryIO,
    identities: np.ndarray,
    ends: np.ndarray,
    fingerprints: tuple[np.ndarray, np.ndarray],
    text: bytes,
) -> None:
    """Appends documents, at least one; numbers are little-endian."""
    hashes, places = fingerprints
    file.write(np.array([len(ends), len(places)], "<i8").tobytes())
    file.write(identities.tobytes())
    for numbers in (ends, hashes.view(np.int64), places):
        file.write(numbers.astype("<i8").tobytes())
    file.write(text)


def read_noted(findings: Sequence[Path]) -> Iterator[NotedBlock]:
    """Yields what :func:`write_noted` wrote to files, in their order."""
    begin = 0
    for path in findings:
        with path.open("rb") as file:
            while len(head := np.fromfile(file, "<i8", 2)):
                documents, number = map(int, head)
                identities = np.fromfile(file, HASH, documents)
                ends = np.fromfile(file, "<i8", documents)
                hashes = np.fromfile(file, "<u8", number)
                places = np.fromfile(file, "<i8", number)
                yield NotedBlock(begin, identities, ends, hashes, places, path, file.tell())
                begin += int(ends[-1])
                file.seek(int(ends[-1]), 1)
