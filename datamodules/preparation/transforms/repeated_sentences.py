"""Removes spans of sentences that were there before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
from datamodules.preparation.duplicates.shingles import mixed
from toolkit.arrow_columns import flags, strings
from toolkit.english_words import SENTENCE_ENDS

MOST_SENTENCES = 1000
"""Limit of `span`."""

_SPACED = ".!?"
_UNSPACED = re.escape("".join(sorted(SENTENCE_ENDS - set(_SPACED))))
_CLOSING = r"[\"'\u2019\u201d\u00bb\u300d\u300f\uff09)\]]*"
_INSIDE = rf"[^\n{_SPACED}{_UNSPACED}]++|[{_SPACED}](?!{_CLOSING}(?:\s|\Z))"
_SENTENCE = re.compile(rf"(?=\S)(?:{_INSIDE})*+(?:[{_SPACED}{_UNSPACED}]{_CLOSING})?")


class _Spans(NamedTuple):
    """Spans of the documents of a batch.

    Attributes:
        parts: Of each document, the sentences and what is between each two.
        numbers: Spans of each document.
        keys: Hash of each span.
        occurrences: Hash of each span's document and its place in that.
    """

    parts: list[list[str]]
    numbers: list[int]
    keys: np.ndarray
    occurrences: np.ndarray


@technique(paper="C4: Raffel et al., arXiv:1910.10683, section 2.2: all but one of any three-sentence span")
class RepeatedSentences(Transform):
    """Removes all but the first of any span of `span` sentences that is in the corpus more than once, also in one document.

    A sentence is removed if any span that it is in was there before, in the order of the source. It ends with a line, or
    with one of . ! ? and white space, or with an end mark of another script. Spans are equal if their sentences are, but for
    white space: by 64 bits of hashes. Among a billion different spans, two are taken for equal in one of 37 corpora.
    Documents of fewer sentences have no span. Counts are sorted on disk, 20 bytes for each sentence, and removed at the
    end; memory does not grow with the corpus.

    Args:
        span: Sentences of a span, 1 to 1,000.
        min_left: Documents that sentences were removed from, and of which fewer characters are left, are dropped; at
            least 0. Those that become empty are always dropped.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: RepeatedSentences
                init_args: {span: 3, min_left: 100}
    """

    needs_all_documents = True
    _removed: Removed | None = None

    def __init__(self, span: int = 3, min_left: int = 100) -> None:
        if not 1 <= span <= MOST_SENTENCES:
            raise ConfigError(f"RepeatedSentences: span is {span}; it is from 1 to {MOST_SENTENCES:,}.")
        if min_left < 0:
            raise ConfigError(f"RepeatedSentences: min_left is {min_left}; it is at least 0.")
        self.span, self.min_left = span, min_left
        self._counts: Counter[str] = Counter()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options."""
        return {"span": self.span, "min_left": self.min_left}

    def map(self, batches: Iterator[pyarrow.RecordBatch], findings: Path) -> None:
        """Writes which spans the documents of a piece have."""
        spans = map(self._spans, batches)
        write_records(
            ((some.keys, np.ones(len(some.keys), int), some.occurrences) for some in spans), findings
        )

    def _spans(self, batch: pyarrow.RecordBatch) -> _Spans:
        parts = [_parts(text) for text in batch["text"].to_pylist()]
        hashes = keys(" ".join(sentence.split()) for some in parts for sentence in some[::2])
        ends = np.cumsum([0, *(len(some[::2]) for some in parts)])
        numbers = [max(int(end - begin) - self.span + 1, 0) for begin, end in pairwise(ends)]
        starts = np.concatenate(
            [np.arange(begin, begin + number) for begin, number in zip(ends, numbers, strict=False)]
        )
        places = starts - np.repeat(ends[:-1], numbers)
        names = np.repeat(prefixes(identities(batch)), numbers)
        return _Spans(
            parts,
            numbers,
            mixed([hashes[starts + place] for place in range(self.span)]),
            mixed([names, places.astype(np.uint64)]),
        )

    def reduce(self, findings: Sequence[Path], conclusion: Path) -> None:
        """Writes which spans are there more than once, and where first."""
        with scratch_folder(conclusion) as scratch:
            write_removed(findings, 1, scratch, conclusion)

    def load(self, conclusion: Path) -> None:
        """Maps the sorted hashes of the repeated spans; they stay on disk."""
        self._removed = read_removed(conclusion)

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Removes sentences; drops documents of which too little is left."""
        texts = batch["text"].to_pylist()
        changed = dict(self._changed(batch, texts))
        if not changed:
            return batch
        column = strings([changed.get(row, text) for row, text in enumerate(texts)])
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", column)
        short = [row for row, text in changed.items() if len(text.strip()) < max(self.min_left, 1)]
        if short:
            drop("too short without repeated sentences", short)
            gone = set(short)
            batch = batch.filter(flags([row not in gone for row in range(len(batch))]))
        return batch

    def _changed(self, batch: pyarrow.RecordBatch, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yields the row of each document that has spans to remove, and what is left of it; counts it."""
        if self._removed is None:
            raise RuntimeError("RepeatedSentences.apply is called after `load`")
        removed, keepers = self._removed
        if not len(removed):
            return
        parts, numbers, found, occurrences = self._spans(batch)
        places = np.minimum(np.searchsorted(removed, found), len(removed) - 1)
        gone = (removed[places] == found) & (keepers[places] != occurrences)
        ends = np.cumsum(numbers)
        for row in np.unique(np.searchsorted(ends, np.flatnonzero(gone), side="right")).tolist():
            spans = gone[ends[row] - numbers[row] : ends[row]]
            chosen = np.convolve(spans, np.ones(self.span, int)) > 0  # of its sentences
            left = without(parts[row], chosen.tolist(), lambda space: (space.count("\n"), len(space)))
            self._counts["sentences removed"] += int(np.count_nonzero(chosen))
            self._counts["characters removed"] += len(texts[row]) - len(left)
            yield row, left

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many sentences and characters were removed since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `load` has read: a process that gets a copy reads it itself."""
        return {name: value for name, value in vars(self).items() if name != "_removed"}


def _parts(text: str) -> list[str]:
    """Returns the sentences of a text, with the white space between each two."""
    places = [(match.start(), match.start() + len(match[0].rstrip())) for match in _SENTENCE.finditer(text)]
    sentences = [text[begin:end] for begin, end in places]
    gaps = [text[one[1] : other[0]] for one, other in pairwise(places)]
    return list(chain.from_iterable(zip(sentences, gaps, strict=False))) + sentences[-1:]
