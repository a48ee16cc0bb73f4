"""What the transforms that drop duplicates share: which documents are dropped, and of which there were more, sorted."""

from __future__ import annotations

import hashlib
import shutil
from abc import abstractmethod
from collections import Counter
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

CLUSTER = np.dtype([("document", HASH), ("size", "<u4")])
"""A document and the size of the cluster of duplicates that it stands for; 0: it is dropped."""


class DuplicateFilter(Transform):
    """A transform whose `reduce` writes which documents are dropped, with :func:`write_clusters`.

    A document is recognised by a hash of its id and text: batches, processes and the order of tasks do not matter.
    Clusters are counted by their size, each where the document is that stays of it.

    Attributes:
        reason: Why documents are dropped.
    """

    needs_all_documents = True
    reason: str
    _clusters: tuple[np.ndarray, np.ndarray] | None = None
    _counts: Counter[str] | None = None

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options: all public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @abstractmethod
    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes what the documents of a piece are compared by, with their :func:`identities`."""

    @abstractmethod
    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Chooses the documents that are dropped, and calls :func:`write_clusters`."""

    def load(self, conclusion: Path) -> None:
        """Maps the sorted hashes of documents, and the sizes of their clusters; they stay on disk."""
        number = conclusion.stat().st_size // CLUSTER.itemsize
        if not number:  # an empty file cannot be mapped
            self._clusters = np.empty(0, HASH), np.empty(0, "<u4")
            return
        documents = np.memmap(conclusion, HASH, "r", 0, (number,))
        sizes = np.memmap(conclusion, "<u4", "r", number * HASH.itemsize, (number,))
        self._clusters = np.asarray(documents), np.asarray(sizes)

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops the documents that `reduce` has chosen."""
        if self._clusters is None:
            raise RuntimeError(f"{type(self).__name__}.apply is called after `load`")
        sizes = self._sizes(batch)
        self._count(sizes[sizes > 0])
        chosen = sizes == 0
        if not chosen.any():
            return batch
        drop(self.reason, np.flatnonzero(chosen).tolist())
        return batch.filter(flags(~chosen))

    def _sizes(self, batch: pyarrow.RecordBatch) -> np.ndarray:
        """Returns the size of the cluster of each document; 0 for those that are dropped."""
        documents, sizes = self._clusters  # type: ignore[misc]
        if not len(documents):
            return np.ones(len(batch), np.int64)
        found = identities(batch)
        places = np.minimum(np.searchsorted(documents, found), len(documents) - 1)
        return np.where(documents[places] == found, sizes[places].astype(np.int64), 1)

    def _count(self, sizes: np.ndarray) -> None:
        """Counts clusters by their size, in ranges that end at powers of two."""
        counts = self._counts = self._counts or Counter()
        for size, number in zip(*np.unique(sizes, return_counts=True), strict=True):
            most = 1 << (int(size) - 1).bit_length()
            named = f"{most // 2 + 1:,} to {most:,}" if most > 2 else f"{most}"
            counts[f"clusters of {named}"] += int(number)
            counts[f"documents in clusters of {named}"] += int(number * size)

    def take_counts(self) -> Mapping[str, int]:
        """Returns the clusters since the last call by their size, and the documents in them."""
        counts, self._counts = self._counts or Counter(), None
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `load` has read: a process that gets a copy reads it itself."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


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


def clusters(documents: np.ndarray, sizes: np.ndarray | int) -> np.ndarray:
    """Returns records of documents, given by their identities, and their sizes."""
    found = np.empty(len(documents), CLUSTER)
    found["document"], found["size"] = documents, sizes
    return found


def write_clusters(found: Iterator[np.ndarray], expected: int, scratch: Path, conclusion: Path) -> None:
    """Writes :data:`CLUSTER` records, those of documents that stay for themselves left out, for :meth:`DuplicateFilter.load`."""
    spilled = SpilledRecords(scratch / "clusters", CLUSTER, expected)
    for some in found:
        spilled.add(some, prefixes(some["document"]))
    # of equal documents, one that is dropped is first
    by_size = (records[np.argsort(records["size"], kind="stable")] for records in spilled.partitions())
    write_sorted(by_size, scratch, conclusion)


def write_sorted(partitions: Iterator[np.ndarray], scratch: Path, conclusion: Path) -> None:
    """Writes records of a `document` and one further field: all documents, ascending, then all values of the other field.

    Args:
        partitions: The records; documents of a later array are not below those of an earlier one.
        scratch: A folder for a file.
        conclusion: The file that is written.
    """
    values = scratch / "values"
    with conclusion.open("wb") as file, values.open("wb") as behind:
        for records in partitions:
            records = records[np.argsort(records["document"], kind="stable")]
            for name, one in zip(records.dtype.names or (), (file, behind), strict=True):
                np.ascontiguousarray(records[name]).tofile(one)
    with conclusion.open("ab") as file, values.open("rb") as behind:
        shutil.copyfileobj(behind, file)


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
