"""Files of what near duplicates are found by: of each document its identity, keys of its bands, and its shingles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from datamodules.preparation.duplicates.duplicate_filter import HASH
from datamodules.preparation.duplicates.shingles import ShingleSets


class Block(NamedTuple):
    """Some documents of a file.

    Attributes:
        identities: Hash of id and text of each.
        keys: uint64, (documents, bands).
        counts: Number of shingles of each.
        at: Byte at which the shingles of each begin.
    """

    identities: np.ndarray
    keys: np.ndarray
    counts: np.ndarray
    at: np.ndarray


def write_block(file: BinaryIO, identities: np.ndarray, keys: np.ndarray, sets: ShingleSets) -> None:
    """Appends documents; numbers are little-endian, as the shingles are when they are read."""
    counts = np.diff(sets.ends)
    file.write(np.array([len(identities), len(sets.values)], "<i8").tobytes())
    for part in (identities, keys.astype("<u8"), counts.astype("<i8"), sets.values.astype("<u8")):
        file.write(part.tobytes())


def read_blocks(path: Path, bands: int) -> Iterator[Block]:
    """Yields what :func:`write_block` wrote, without the shingles."""
    with path.open("rb") as file:
        while len(head := np.fromfile(file, "<i8", 2)):
            documents, shingles = map(int, head)
            identities = np.fromfile(file, HASH, documents)
            keys = np.fromfile(file, "<u8", documents * bands).reshape(documents, bands)
            counts = np.fromfile(file, "<i8", documents)
            at = file.tell() + 8 * (np.cumsum(counts) - counts)
            yield Block(identities, keys, counts, at)
            file.seek(8 * shingles, 1)


def count_documents(path: Path, bands: int) -> int:
    """Returns the number of documents of a file, from the heads of its blocks."""
    number = 0
    with path.open("rb") as file:
        while len(head := np.fromfile(file, "<i8", 2)):
            number += int(head[0])
            file.seek(int(head[0]) * (HASH.itemsize + 8 * bands + 8) + 8 * int(head[1]), 1)
    return number
