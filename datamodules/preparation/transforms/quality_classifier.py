"""Drops documents to which a trained classifier gives a low score."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from core.errors import ConfigError
from core.technique import technique
from toolkit.arrow_columns import numbers, with_column
from toolkit.document_filter import DocumentFilter
from toolkit.quality_model import read_quality_model

_BINS = 10


@technique(
    paper="DataComp-LM, arXiv:2406.11794, section 4.4: a linear classifier of word n-grams as fastText, arXiv:1607.01759"
)
class QualityClassifier(DocumentFilter):
    """Drops documents to which a trained classifier gives a low score.

    `python -m core train-quality-filter` writes the file: a logistic regression on hashed word n-grams. The score of a
    document is the probability that it is one of the good examples. The report counts the scores of all documents, in
    tenths. The time is linear in the text's length, up to the number of characters that the file says.

    Args:
        path: The file.
        min_score: Least score that is kept, 0 to 1. 0.5 separates the examples best where both kinds are as frequent
            in the text as they were among them; for a share of the text, see the counts in the report. 0: none is dropped.
        column: Name of a column that is added with the scores, for `Rebalance` and documents.parquet; None: none is.

    Raises:
        ConfigError: If the file cannot be read, is damaged or no quality filter, or `min_score` is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: QualityClassifier
                init_args: {path: quality.safetensors, min_score: 0.5}
    """

    def __init__(self, path: str, min_score: float = 0.5, column: str | None = None) -> None:
        if not 0 <= min_score <= 1:
            raise ConfigError(f"QualityClassifier.min_score is {min_score}; it is between 0 and 1.")
        self.min_score, self.column = min_score, column
        self._model = read_quality_model(Path(path))
        self._counts: Counter[str] = Counter()
        self._scores: list[float] = []

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the least score, the digest of the file, and the version of the Unicode tables (lower case)."""
        return {**super().fingerprint(), "model": self._model.digest, "unicode": unicodedata.unidata_version}

    def take_counts(self) -> Mapping[str, int]:
        """Returns how many documents had which scores since the last call, in tenths."""
        counts, self._counts = self._counts, Counter()
        return counts

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops documents with a low score; adds the scores of the others."""
        self._scores = []
        kept = super().apply(batch, drop)
        if self.column is None:
            return kept
        scores = [score for score in self._scores if score >= self.min_score]
        return with_column(kept, self.column, numbers(np.array(scores)), "QualityClassifier")

    def reason(self, text: str) -> str | None:
        """Returns "low score" or None."""
        score = self._model.score(text)
        self._scores.append(score)
        tenth = min(int(score * _BINS), _BINS - 1)
        self._counts[f"score {tenth / _BINS:.1f} to {(tenth + 1) / _BINS:.1f}"] += 1
        return "low score" if score < self.min_score else None
