"""Removes lines or paragraphs that many documents have."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.duplicates.duplicate_filter import identities, prefixes, scratch_folder
from datamodules.preparation.duplicates.line_records import (
    Removed,
    keys,
    read_removed,
    without,
    write_records,
    write_removed,
)
from toolkit.arrow_columns import flags, strings

_ENDS = {
    "line": re.compile(r"(\n(?:[^\S\n]*\n)*)"),  # with the empty lines behind it
    "paragraph": re.compile(r"(\n(?:[^\S\n]*\n)+)"),
}
_EDGES = re.compile(r"\A(?:[^\S\n]*\n)+|\n[^\S\n]*\Z")
"""Empty lines around the first paragraph, and the end of the last line."""

_DIGITS = re.compile(r"\d+")


@technique(
    paper="CCNet: Wenzek et al., arXiv:1911.00359, section 3.1; the first occurrence stays as in C4: Raffel et al., "
    "arXiv:1910.10683, section 2.2, there spans of three sentences"
)
class RepeatedLines(Transform):
    """Removes lines, or paragraphs, that are in more than some number of documents: menus, cookie banners, footers.

    A paragraph ends at an empty line. Lines are compared by 64 bits of BLAKE2b of what `ignore_case`,
    `ignore_digits` and `ignore_space` leave of them (CCNet: of SHA-1). Among a billion different lines, two are taken
    for equal in one of 37 corpora. A line that is in one document only is not removed, however often it is there.
    Of the gaps around removed lines the longest stays. Counts are sorted on disk, up to 40 bytes for each line of a
    document, and removed at the end; memory does not grow with the corpus. The report counts removed lines and
    characters.

    Args:
        unit: What is removed.
        max_documents: In how many documents a line may be; in more, it is removed. At least 1.
        keep_first: Whether the first document in the order of the source keeps the line.
        min_characters: Lines of fewer characters, as compared, are left alone; at least 0.
        min_left: Documents that lines were removed from, and of which fewer characters are left, are dropped; at
            least 0. Those that become empty are always dropped.
        ignore_case: Whether upper and lower case letters are the same.
        ignore_digits: Whether all numbers are the same.
        ignore_space: Whether any run of white space is one space, and none at the ends of a line.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: RepeatedLines
                init_args: {unit: line, max_documents: 1, keep_first: true, min_characters: 20, min_left: 100}
    """

    needs_all_documents = True
    _removed: Removed | None = None

    def __init__(
        self,
        unit: Literal["line", "paragraph"] = "line",
        max_documents: int = 1,
        keep_first: bool = True,
        min_characters: int = 20,
        min_left: int = 100,
        ignore_case: bool = True,
        ignore_digits: bool = True,
        ignore_space: bool = True,
    ) -> None:
        if unit not in _ENDS:
            raise ConfigError(f"RepeatedLines: unit is {unit!r}; it is {' or '.join(map(repr, _ENDS))}.")
        for name, value, least in (
            ("max_documents", max_documents, 1),
            ("min_characters", min_characters, 0),
            ("min_left", min_left, 0),
        ):
            if not least <= value < (1 << 32) - 1:
                raise ConfigError(f"RepeatedLines: {name} is {value}; it is from {least} to {(1 << 32) - 2}.")
        self.unit, self.max_documents, self.keep_first = unit, max_documents, keep_first
        self.min_characters, self.min_left = min_characters, min_left
        self.ignore_case, self.ignore_digits, self.ignore_space = ignore_case, ignore_digits, ignore_space
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the Unicode tables, which tell letters, digits and spaces."""
        options = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return options | {"unicode": unicodedata.unidata_version}

    def compared(self, text: str) -> list[str]:
        """Returns what of each line of a document is compared; an empty text for those that are left alone."""
        text = text.casefold() if self.ignore_case else text  # neither changes white space
        text = _DIGITS.sub("0", text) if self.ignore_digits else text
        lines = _ENDS[self.unit].split(text)[::2]
        if self.ignore_space:
            lines = [" ".join(line.split()) for line in lines]
        elif self.unit == "paragraph":
            lines = [_EDGES.sub("", line) for line in lines]
        least = self.min_characters
        return ["" if len(line) < least or line.isspace() else line for line in lines]

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes which lines the documents of a piece have."""
        write_records(map(self._lines, batches), findings)

    def _lines(self, batch: pyarrow.RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns hashes of the different lines of each document, the number of them, and the documents' hashes."""
        found = [dict.fromkeys(filter(None, self.compared(text))) for text in batch["text"].to_pylist()]
        lines = keys(line for some in found for line in some)
        return lines, np.array([len(some) for some in found]), prefixes(identities(batch))

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes which lines are in too many documents."""
        with scratch_folder(conclusion) as scratch:
            write_removed(findings, self.max_documents, scratch, conclusion)

    def load(self, conclusion: Path) -> None:
        """Maps the sorted hashes of the removed lines; they stay on disk."""
        self._removed = read_removed(conclusion)

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Removes lines; drops documents of which too little is left."""
        texts = batch["text"].to_pylist()
        changed = {row: self._without(texts[row], chosen) for row, chosen in self._chosen(batch, texts)}
        if not changed:
            return batch
        column = strings([changed.get(row, text) for row, text in enumerate(texts)])
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", column)
        least = max(self.min_left, 1)
        short = [row for row, text in changed.items() if len(text.strip()) < least]
        if short:
            drop(f"too short without repeated {self.unit}s", short)
            kept = np.ones(len(batch), np.bool_)
            kept[short] = False
            batch = batch.filter(flags(kept.tolist()))
        return batch

    def _chosen(self, batch: pyarrow.RecordBatch, texts: Sequence[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the row of each document that has lines to remove, and for each line whether it is one."""
        if self._removed is None:
            raise RuntimeError("RepeatedLines.apply is called after `load`")
        removed, keepers = self._removed
        if not len(removed):
            return
        compared = [self.compared(text) for text in texts]
        ends = np.cumsum([len(lines) for lines in compared])
        found = keys(line for lines in compared for line in lines)
        places = np.minimum(np.searchsorted(removed, found), len(removed) - 1)
        chosen = removed[places] == found  # never those that are left alone: `map` leaves them out
        if self.keep_first and chosen.any():
            documents = np.repeat(prefixes(identities(batch)), np.diff(ends, prepend=0))
            chosen &= keepers[places] != documents
        for row in np.unique(np.searchsorted(ends, np.flatnonzero(chosen), side="right")).tolist():
            yield row, chosen[ends[row - 1] if row else 0 : ends[row]]

    def _without(self, text: str, chosen: np.ndarray) -> str:
        """Returns a document without the chosen lines, and counts them."""
        found = without(_ENDS[self.unit].split(text), chosen.tolist())
        self._counts[f"{self.unit}s removed"] += int(np.count_nonzero(chosen))
        self._counts["characters removed"] += len(text) - len(found)
        return found

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many lines and characters were removed since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `load` has read: a process that gets a copy reads it itself."""
        return {name: value for name, value in vars(self).items() if name != "_removed"}
