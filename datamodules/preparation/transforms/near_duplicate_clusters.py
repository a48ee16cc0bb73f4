"""Marks documents that are nearly the same, and keeps them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow

from core.errors import ConfigError
from core.technique import Package, technique
from datamodules.preparation.duplicates.duplicate_filter import (
    HASH,
    hashes,
    identities,
    prefixes,
    scratch_folder,
    write_sorted,
)
from datamodules.preparation.duplicates.near_pairs import NearPairs
from datamodules.preparation.duplicates.spilled_records import SpilledRecords
from datamodules.preparation.transforms.near_duplicates import NearDuplicates
from toolkit.arrow_columns import strings

_COLUMN = "cluster"
_MEMBER = np.dtype([("document", HASH), ("first", HASH)])


@technique(
    paper="MinHash: Broder 1997; clusters of near duplicates as connected components: Lee et al., arXiv:2107.06499, appendix A",
    needs=[Package("rensa>=0.5,<0.6", extra="dedup")],
)
class NearDuplicateClusters(NearDuplicates):
    """Gives documents that resemble one another the same value in a column `cluster`; drops none.

    With SplitBy behind it, near duplicates never straddle a split. Two documents resemble each other as for NearDuplicates:
    MinHash finds candidates, the Jaccard similarity of their n-grams decides. A cluster is all that is connected by such
    pairs: its ends may differ. A document that resembles none has a value that only equal texts share. The defaults
    find more, and less similar, pairs than those of NearDuplicates: one of similarity 0.7 is missed once in 2,000. Where
    more than 17 documents share a band, each is compared with 16 of these that resemble none of each other.

    Disk and memory are those of NearDuplicates, and 4 bytes more for each document.

    Args:
        threshold: Least Jaccard similarity of two documents that resemble each other, above 0 and at most 1.
        ngram: Words of an n-gram.
        bands: Bands of the signature; more find more candidates.
        rows: MinHash values of a band; fewer find more candidates.
        seed: Of the hash functions, at least 0.

    Raises:
        ConfigError: If an argument is out of range, or documents have such a column already.

    Example:
        data:
          init_args:
            transforms:
              - class_path: NearDuplicateClusters
                init_args: {threshold: 0.7}
              - class_path: SplitBy
                init_args: {column: cluster}
    """

    version = 1
    _members: tuple[np.ndarray, np.ndarray] | None = None

    def __init__(
        self, threshold: float = 0.7, ngram: int = 5, bands: int = 28, rows: int = 4, seed: int = 0
    ) -> None:
        super().__init__(threshold, ngram, bands, rows, seed)

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes the documents that resemble another one, sorted, each with the first one of its cluster."""
        with (
            scratch_folder(conclusion) as scratch,
            NearPairs(findings, self.bands, scratch) as pairs,
        ):
            spilled = SpilledRecords(scratch / "clusters", _MEMBER, pairs.number)
            for documents, firsts in pairs.components(self.threshold):
                members = np.empty(len(documents), _MEMBER)
                members["document"], members["first"] = documents, firsts
                spilled.add(members, prefixes(documents))
            write_sorted(spilled.partitions(), scratch, conclusion)

    def load(self, conclusion: Path) -> None:
        """Maps the members of clusters; they stay on disk."""
        number = conclusion.stat().st_size // _MEMBER.itemsize
        # an empty file cannot be mapped
        both = np.memmap(conclusion, HASH, "r") if number else np.empty(0, HASH)
        self._members = np.asarray(both[:number]), np.asarray(both[number:])

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Adds the column."""
        if self._members is None:
            raise RuntimeError(f"{type(self).__name__}.apply is called after `load`")
        if _COLUMN in batch.schema.names:
            raise ConfigError(f"NearDuplicateClusters: documents have a column {_COLUMN!r} already.")
        found = hashes([text.encode() for text in batch["text"].to_pylist()])
        documents, firsts = self._members
        if len(documents):
            own = identities(batch)
            places = np.minimum(np.searchsorted(documents, own), len(documents) - 1)
            found = np.where(documents[places] == own, firsts[places], found)
        values = [value.ljust(HASH.itemsize, b"\0").hex() for value in found.tolist()]
        return batch.append_column(_COLUMN, strings(values))
