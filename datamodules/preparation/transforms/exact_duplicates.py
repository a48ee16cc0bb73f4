"""Drops documents whose text was there before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow

from core.technique import technique
from datamodules.preparation.duplicates.duplicate_filter import (
    HASH,
    DuplicateFilter,
    clusters,
    hashes,
    identities,
    prefixes,
    scratch_folder,
    write_clusters,
)
from datamodules.preparation.duplicates.spilled_records import SpilledRecords

_RECORD = np.dtype([("text", HASH), ("document", HASH)])
_CHUNK = 1 << 18
"""Records that are read at a time."""


@technique(paper="BLAKE2, RFC 7693; exact duplicates as in Lee et al., arXiv:2107.06499, section 4")
class ExactDuplicates(DuplicateFilter):
    """Drops each document whose text is that of an earlier one; the first in the order of the source stays.

    Texts are compared by 128 bits of BLAKE2b: two of a billion different ones are taken for equal with a probability
    of 1e-21. Hashes are sorted on disk, 64 bytes for each document, and removed at the end; memory does not grow
    with the corpus. Documents of equal id and text cannot be told apart and are kept: readers give each its own id.

    Args:
        ignore_case: Whether upper and lower case letters are the same.
        ignore_space: Whether any run of white space is one space, and none at the ends of a text.

    Example:
        data:
          init_args:
            transforms:
              - class_path: ExactDuplicates
                init_args: {ignore_case: true, ignore_space: true}
    """

    reason = "exact duplicate"

    def __init__(self, ignore_case: bool = False, ignore_space: bool = False) -> None:
        self.ignore_case, self.ignore_space = ignore_case, ignore_space

    def compared(self, text: str) -> str:
        """Returns what of a text is compared."""
        text = text.casefold() if self.ignore_case else text
        return " ".join(text.split()) if self.ignore_space else text

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes the hashes of each document of a piece: of its text, and of id and text."""
        with findings.open("wb") as file:
            for batch in batches:
                records = np.empty(len(batch), _RECORD)
                records["text"] = hashes([self.compared(text).encode() for text in batch["text"].to_pylist()])
                records["document"] = identities(batch)
                records.tofile(file)

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes which documents have the text of an earlier one."""
        expected = sum(path.stat().st_size for path in findings) // _RECORD.itemsize
        with scratch_folder(conclusion) as scratch:
            spilled = SpilledRecords(scratch / "texts", _RECORD, expected)
            for records in _read(findings):
                spilled.add(records, prefixes(records["text"]))
            write_clusters(map(_clusters, spilled.partitions()), expected, scratch, conclusion)


def _read(findings: Sequence[Path]) -> Iterator[np.ndarray]:
    for path in findings:
        with path.open("rb") as file:
            while len(records := np.fromfile(file, _RECORD, _CHUNK)):
                yield records


def _clusters(records: np.ndarray) -> np.ndarray:
    """Returns the documents that have the text of an earlier record, and the first of each text that they have."""
    records = records[np.argsort(records["text"], kind="stable")]
    new = np.ones(len(records), np.bool_)
    new[1:] = records["text"][1:] != records["text"][:-1]
    own = np.cumsum(new) - 1
    first = records["document"][new]
    dropped = records["document"] != first[own]
    sizes = 1 + np.bincount(own[dropped], minlength=len(first))
    found = clusters(records["document"][dropped], 0), clusters(first[sizes > 1], sizes[sizes > 1])
    return np.concatenate(found)
