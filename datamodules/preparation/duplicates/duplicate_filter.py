"""What the transforms that drop duplicates share: which documents are dropped, as a sorted file of hashes."""

from __future__ import annotations

import hashlib
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core.contracts import Transform
from datamodules.preparation.duplicates.spilled_records import SpilledRecords
from toolkit.arrow_columns import flags

HASH = np.dtype("S16")
"""128 bits. numpy compares all 16 bytes; only as a Python object it would lose zeros at the end."""


class DuplicateFilter(Transform):
    """A transform whose `reduce` writes which documents are dropped, with :func:`write_dropped`.

    A document is recognised by a hash of its id and text: batches, processes and the order of tasks do not matter.

    Attributes:
        reason: Why documents are dropped.
    """

    needs_all_documents = True
    reason: str
    _dropped: np.ndarray | None = None

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options: all public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @abstractmethod
    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes what the documents of a piece are compared by, with their :func:`identities`."""

    @abstractmethod
    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Chooses the documents that are dropped, and calls :func:`write_dropped`."""

    def load(self, conclusion: Path) -> None:
        """Maps the sorted hashes of the dropped documents; they stay on disk."""
        empty = conclusion.stat().st_size == 0  # which cannot be mapped
        self._dropped = np.empty(0, HASH) if empty else np.asarray(np.memmap(conclusion, HASH, mode="r"))

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops the documents that `reduce` has chosen."""
        if self._dropped is None:
            raise RuntimeError(f"{type(self).__name__}.apply is called after `load`")
        if not len(self._dropped):
            return batch
        found = identities(batch)
        places = np.minimum(np.searchsorted(self._dropped, found), len(self._dropped) - 1)
        chosen = self._dropped[places] == found
        if not chosen.any():
            return batch
        drop(self.reason, np.flatnonzero(chosen).tolist())
        return batch.filter(flags(~chosen))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `load` has read: a process that gets a copy reads it itself."""
        return {name: value for name, value in vars(self).items() if name != "_dropped"}


def hashes(texts: list[bytes]) -> np.ndarray:
    """Returns 128 bits of BLAKE2b of each."""
    digests = [hashlib.blake2b(text, digest_size=HASH.itemsize).digest() for text in texts]
    return np.frombuffer(b"".join(digests), HASH)


def identities(batch: pyarrow.RecordBatch) -> np.ndarray:
    """Returns a hash of id and text of each document."""
    columns = batch["id"].to_pylist(), batch["text"].to_pylist()
    return hashes([f"{name}\0{text}".encode() for name, text in zip(*columns, strict=True)])


def prefixes(found: np.ndarray) -> np.ndarray:
    """Returns the first 64 bits of each hash, in the order of the hashes."""
    return np.ascontiguousarray(found).view(">u8")[::2].astype(np.uint64)


def write_dropped(dropped: Iterator[np.ndarray], expected: int, scratch: Path, conclusion: Path) -> None:
    """Writes the identities of the dropped documents, sorted, for :meth:`DuplicateFilter.load`."""
    spilled = SpilledRecords(scratch, HASH, expected)
    for some in dropped:
        spilled.add(some, prefixes(some))
    with conclusion.open("wb") as file:
        for records in spilled.partitions():
            np.sort(records).tofile(file)


@contextmanager
def scratch_folder(conclusion: Path) -> Iterator[Path]:
    """Yields an empty folder beside the conclusion, removed at the end; an interrupted `reduce` leaves none behind."""
    folder = conclusion.parent / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
