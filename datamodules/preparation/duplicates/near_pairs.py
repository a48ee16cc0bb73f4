"""Finds near duplicates among signatures on disk: documents that share a band, checked by their shingles, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np

from core.errors import ConfigError
from datamodules.preparation.duplicates.duplicate_filter import HASH, clusters
from datamodules.preparation.duplicates.shingles import jaccard
from datamodules.preparation.duplicates.signature_file import count_documents, read_blocks
from datamodules.preparation.duplicates.spilled_records import SpilledRecords

PARTNERS = 8
"""A document is compared with so many of the first, and of the last before it, of those that share a band with it."""

_PLACE = np.dtype([("file", "<u4"), ("count", "<i8"), ("at", "<i8"), ("identity", HASH)])
_KEY = np.dtype([("key", "<u8"), ("document", "<u4")])
_NUMBER = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_OPEN_FILES = 64
_CHUNK = 1 << 18


class NearPairs:
    """The documents of several signature files, numbered in their order. A context: it holds files open.

    Args:
        findings: Signature files, in the order of the source.
        bands: Keys of a document.
        scratch: An empty folder for what does not fit into memory.

    Attributes:
        number: Number of documents.

    Raises:
        ConfigError: If there are more than 4 billion documents.
    """

    def __init__(self, findings: Sequence[Path], bands: int, scratch: Path) -> None:
        self.number = sum(count_documents(path, bands) for path in findings)
        if self.number > 1 << 32:
            raise ConfigError(
                f"NearDuplicates: {self.number:,} documents; it takes at most {1 << 32:,}. Split the source."
            )
        self._findings, self._bands, self._scratch = findings, bands, scratch
        self._opened = lru_cache(_OPEN_FILES)(_Opened)
        self._places = np.empty(0, _PLACE)

    def __enter__(self) -> NearPairs:
        return self

    def __exit__(self, kind: type | None, error: object, trace: TracebackType | None) -> None:
        self._opened.cache_clear()
        self._places = np.empty(0, _PLACE)  # it maps a file of the scratch folder

    def clusters(self, threshold: float) -> Iterator[np.ndarray]:
        """Yields the documents that resemble an earlier one that is not dropped itself, and that one with their number.

        A cluster is a document that stays, and those that are dropped because of it.

        Args:
            threshold: Least Jaccard similarity.
        """
        keys = self._sorted_in()
        gone = np.zeros(self.number, np.bool_)  # a byte for each document is what is kept in memory
        pairs = SpilledRecords(
            self._scratch / "pairs", np.dtype("<u8"), self.number * PARTNERS * 2, (self.number << 32) or 1
        )
        for records in keys.partitions():
            for found in _pairs(records):
                pairs.add(found, found)
        kept = SpilledRecords(self._scratch / "kept", np.dtype("<u8"), self.number, self.number or 1)
        for records in pairs.partitions():
            found = self._decide(np.unique(records), threshold, gone)
            kept.add(found, found)
        for begin in range(0, self.number, _CHUNK):
            yield clusters(self._places["identity"][begin : begin + _CHUNK][gone[begin : begin + _CHUNK]], 0)
        for records in kept.partitions():
            found, numbers = np.unique(records, return_counts=True)
            yield clusters(self._places["identity"][found], numbers + 1)

    def _sorted_in(self) -> SpilledRecords:
        """Returns the keys of all documents, by the range of the keys; notes where the documents' shingles are."""
        keys = SpilledRecords(self._scratch / "keys", _KEY, self.number * self._bands)
        path, first = self._scratch / "places", 0
        with path.open("wb") as file:
            for number, findings in enumerate(self._findings):
                for block in read_blocks(findings, self._bands):
                    places = np.empty(len(block.identities), _PLACE)
                    places["file"], places["count"], places["at"] = number, block.counts, block.at
                    places["identity"] = block.identities
                    places.tofile(file)
                    records = np.empty(block.keys.shape, _KEY)
                    records["key"] = block.keys
                    records["document"] = np.arange(first, first + len(places))[:, None]
                    keys.add(records.ravel(), block.keys.ravel())
                    first += len(places)
        if self.number:
            self._places = np.asarray(np.memmap(path, _PLACE, mode="r"))
        return keys

    def _decide(self, pairs: np.ndarray, threshold: float, gone: np.ndarray) -> np.ndarray:
        """Marks the later document of each pair that resembles the earlier one, if that one stays; returns the earlier ones."""
        stay = list[int]()
        last, own = -1, np.empty(0, np.uint64)
        sizes, identities = self._places["count"], self._places["identity"]
        for one, other in zip((pairs & _LOW).tolist(), (pairs >> _NUMBER).tolist(), strict=True):
            if gone[one] or gone[other]:
                continue
            smaller, larger = sorted((int(sizes[one]), int(sizes[other])))
            if smaller < threshold * larger * (1 - 1e-9) or identities[one] == identities[other]:
                continue
            if other != last:
                last, own = other, self._shingles(other)
            if jaccard(self._shingles(one), own) >= threshold:
                gone[other] = True
                stay.append(one)
        return np.array(stay, np.uint64)

    def _shingles(self, document: int) -> np.ndarray:
        place = self._places[document]
        return self._opened(self._findings[place["file"]]).read(int(place["at"]), int(place["count"]))


def _pairs(records: np.ndarray) -> Iterator[np.ndarray]:
    """Yields pairs of documents with an equal key: the later one's number in the upper 32 bits, then the earlier's."""
    records = records[np.argsort(records["key"], kind="stable")]  # documents stay in their order
    keys, documents = records["key"], records["document"].astype(np.uint64)
    index = np.arange(len(keys))
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    starts = np.maximum.accumulate(np.where(new, index, 0))
    rank = index - starts
    for back in range(1, PARTNERS + 1):
        later = index[rank >= back]
        yield _paired(documents, later - back, later)
        later = index[rank >= back + PARTNERS]  # those for which it is not one of the last
        yield _paired(documents, starts[later] + back - 1, later)


def _paired(documents: np.ndarray, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    one, other = documents[earlier], documents[later]
    found = one != other
    return (other[found] << _NUMBER) | one[found]


class _Opened:
    """A signature file that is read at any place; closed when nothing refers to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read(self, at: int, count: int) -> np.ndarray:
        """Returns the shingles of a document."""
        return np.frombuffer(os.pread(self._file.fileno(), 8 * count, at), "<u8")
