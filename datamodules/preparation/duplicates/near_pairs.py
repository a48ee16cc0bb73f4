"""Finds near duplicates among signatures on disk: documents that share a band, checked by their shingles, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType

import numpy as np

from core.errors import ConfigError
from datamodules.preparation.duplicates.duplicate_filter import HASH, clusters
from datamodules.preparation.duplicates.shingles import jaccard
from datamodules.preparation.duplicates.signature_file import count_documents, read_blocks
from datamodules.preparation.duplicates.spilled_records import SpilledRecords

PARTNERS = 8
"""A document is compared with so many of the first, and of the last before it, of those that share a band with it and stay."""

SMALL = 2 * PARTNERS + 1
"""Documents of a band up to which each is compared with all before it. Of larger ones, those that stay are kept in a table."""

_PLACE = np.dtype([("file", "<u4"), ("count", "<i8"), ("at", "<i8"), ("identity", HASH)])
_KEY = np.dtype([("key", "<u8"), ("document", "<u4")])
_NUMBER = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_GROUP = 1 << 31
"""What is added to the number of a group in place of the earlier document."""

_MOST = _GROUP
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
        ConfigError: If there are more than 2 billion documents.
    """

    def __init__(self, findings: Sequence[Path], bands: int, scratch: Path) -> None:
        self.number = sum(count_documents(path, bands) for path in findings)
        if self.number > _MOST:
            raise ConfigError(
                f"NearDuplicates: {self.number:,} documents; it takes at most {_MOST:,}. Split the source."
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
        pairs, table = self._candidates()
        gone = np.zeros(self.number, np.bool_)  # a byte for each document is what is kept in memory
        kept = SpilledRecords(self._scratch / "kept", np.dtype("<u8"), self.number, self.number or 1)
        for records in pairs.partitions():
            found = self._decide(np.unique(records), threshold, gone, table)
            kept.add(found, found)
        for begin in range(0, self.number, _CHUNK):
            yield clusters(self._places["identity"][begin : begin + _CHUNK][gone[begin : begin + _CHUNK]], 0)
        for records in kept.partitions():
            found, numbers = np.unique(records, return_counts=True)
            yield clusters(self._places["identity"][found], numbers + 1)

    def components(self, threshold: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the documents that resemble another one, and of each the first document that it is connected to.

        Two documents are connected if they resemble each other, or if both are connected to a third one.

        Args:
            threshold: Least Jaccard similarity.
        """
        pairs, table = self._candidates()
        components = _Components(self.number)
        for records in pairs.partitions():
            self._connect(np.unique(records), threshold, components, table)
        identities = self._places["identity"]
        for begin in range(0, self.number, _CHUNK):
            documents = begin + np.flatnonzero(components.joined[begin : begin + _CHUNK])
            firsts = np.array([components.first(document) for document in documents.tolist()], np.int64)
            yield identities[documents], identities[firsts]

    def _candidates(self) -> tuple[SpilledRecords, _Table]:
        """Returns each document with earlier ones, or groups, that it shares a band with; and an empty table of the groups."""
        keys = self._sorted_in()
        pairs = SpilledRecords(
            self._scratch / "pairs", np.dtype("<u8"), self.number * PARTNERS * 2, (self.number << 32) or 1
        )
        groups = 0
        for records in keys.partitions():
            documents, ranks, sizes = _grouped(records)
            for found in _pairs(documents, ranks, sizes):
                pairs.add(found, found)
            members = documents[sizes > SMALL] << _NUMBER
            new = np.cumsum(ranks[sizes > SMALL] == 0)
            pairs.add(members | (new + (groups + _GROUP - 1)).astype(np.uint64), members)
            groups += int(new[-1]) if len(new) else 0
        return pairs, _Table(self._scratch / "groups", groups)

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

    def _decide(self, pairs: np.ndarray, threshold: float, gone: np.ndarray, table: _Table) -> np.ndarray:
        """Marks each document that resembles an earlier one that stays; returns the first of these for each.

        Args:
            pairs: Ascending: the later document in the upper 32 bits; the earlier one, or the number of a group.
            threshold: Least Jaccard similarity.
            gone: Whether a document is dropped, of all of them.
            table: The groups' documents that stay.
        """
        stay = list[int]()
        for other, partners, groups in _by_document(pairs):
            earlier = partners.union(*map(table.of, groups))
            one = self._resembled(other, sorted(number for number in earlier if not gone[number]), threshold)
            if one is not None:
                gone[other] = True
                stay.append(one)
                continue
            for group in groups:
                table.add(group, other)
        return np.array(stay, np.uint64)

    def _connect(self, pairs: np.ndarray, threshold: float, components: _Components, table: _Table) -> None:
        """Joins each document with the earlier ones that it resembles.

        Args:
            pairs: As for :meth:`_decide`.
            threshold: Least Jaccard similarity.
            components: What is connected so far.
            table: Documents of each group; one that is connected to one of them is not added.
        """
        identities = self._places["identity"]
        for other, partners, groups in _by_document(pairs):
            for one in sorted(partners.union(*map(table.of, groups))):
                if components.first(one) != components.first(other) and (
                    identities[one] == identities[other]
                    or self._resembled(other, [one], threshold) is not None
                ):
                    components.join(one, other)
            own = components.first(other)
            for group in groups:
                if all(components.first(one) != own for one in table.of(group)):
                    table.add(group, other)

    def _resembled(self, other: int, earlier: Sequence[int], threshold: float) -> int | None:
        """Returns the first of some documents that a later one resembles."""
        sizes, identities, own = self._places["count"], self._places["identity"], None
        for one in earlier:
            smaller, larger = sorted((int(sizes[one]), int(sizes[other])))
            if smaller < threshold * larger * (1 - 1e-9) or identities[one] == identities[other]:
                continue
            own = self._shingles(other) if own is None else own
            if jaccard(self._shingles(one), own) >= threshold:
                return one
        return None

    def _shingles(self, document: int) -> np.ndarray:
        place = self._places[document]
        return self._opened(self._findings[place["file"]]).read(int(place["at"]), int(place["count"]))


def _by_document(pairs: np.ndarray) -> Iterator[tuple[int, set[int], list[int]]]:
    """Yields each document of some pairs, ascending, with the earlier ones and with the numbers of its groups."""
    numbered = zip((pairs >> _NUMBER).tolist(), (pairs & _LOW).tolist(), strict=True)
    for other, found in groupby(numbered, itemgetter(0)):
        partners = [number for _, number in found]
        groups = [number - _GROUP for number in partners if number >= _GROUP]
        yield other, {number for number in partners if number < _GROUP}, groups


def _grouped(records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the documents that share a key by their keys, the place of each among those with its key, and their number."""
    records = records[np.argsort(records["key"], kind="stable")]  # documents stay in their order
    new = np.ones(len(records), np.bool_)
    new[1:] = records["key"][1:] != records["key"][:-1]
    sizes = np.diff(np.flatnonzero(new), append=len(records))
    documents = records["document"][np.repeat(sizes > 1, sizes)].astype(np.uint64)
    sizes = sizes[sizes > 1]
    ranks = np.arange(len(documents)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return documents, ranks, np.repeat(sizes, sizes)


def _pairs(documents: np.ndarray, ranks: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Yields pairs of documents of small groups: the later one's number in the upper 32 bits, then the earlier's."""
    small = sizes <= SMALL
    for back in range(1, SMALL):
        later = np.flatnonzero(small & (ranks >= back))
        yield _paired(documents, later - back, later)


def _paired(documents: np.ndarray, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    one, other = documents[earlier], documents[later]
    found = one != other
    return (other[found] << _NUMBER) | one[found]


class _Components:
    """Documents that are connected, as a union-find: 5 bytes for each document.

    Args:
        number: Number of documents.

    Attributes:
        joined: Whether each document is connected to another one.
    """

    def __init__(self, number: int) -> None:
        self._parents = np.arange(number, dtype=np.uint32)
        self.joined = np.zeros(number, np.bool_)

    def first(self, document: int) -> int:
        """Returns the first of the documents that are connected to one, or itself."""
        parents = self._parents
        while (parent := int(parents[document])) != document:
            parents[document] = parents[parent]  # halves the path for the next time
            document = parent
        return document

    def join(self, one: int, other: int) -> None:
        """Connects two documents."""
        low, high = sorted((self.first(one), self.first(other)))
        self._parents[high] = low
        self.joined[[one, other]] = True


class _Table:
    """Of each group, 8 of the first and 8 of the last documents that stay. It is a file that is mapped.

    Args:
        path: The file.
        groups: Number of groups.
    """

    def __init__(self, path: Path, groups: int) -> None:
        self._rows = np.memmap(
            path, "<u4", "w+", shape=(groups or 1, SMALL)
        )  # number of documents, documents

    def of(self, group: int) -> list[int]:
        """Returns a group's documents."""
        row = self._rows[group]
        return row[1 : int(row[0]) + 1].tolist()  # the number may be larger than there is room

    def add(self, group: int, document: int) -> None:
        """Adds a document, in place of the earliest but for the first ones where there is no more room."""
        row = self._rows[group]
        number = int(row[0])
        row[1 + (number if number < PARTNERS else PARTNERS + number % PARTNERS)] = document
        row[0] = number + 1


class _Opened:
    """A signature file that is read at any place; closed when nothing refers to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read(self, at: int, count: int) -> np.ndarray:
        """Returns the shingles of a document."""
        return np.frombuffer(os.pread(self._file.fileno(), 8 * count, at), "<u8")
