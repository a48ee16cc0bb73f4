"""Chooses which documents stay together when text is split for training, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.split import SPLIT_KEY
from toolkit.arrow_columns import column_of, strings


@technique(
    paper="grouped cross-validation (scikit-learn's GroupKFold); splits by time: TiC-LM, arXiv:2504.02107, Lazaridou et al., "
    "arXiv:2102.01951"
)
class SplitBy(Transform):
    """Puts all documents with the same source, site, date or other value into the same split, or splits by date.

    Without it, each document is split by a hash of its text. With it, `validation_fraction` and `test_fraction` of the text are
    held out as whole groups: by a hash of their value, or, if groups are few and unequal, the smallest ones. Documents
    whose value is not known are groups of their own. With `validation_from`, documents are not grouped: those with this value
    or a later one are held out for validation, those from `test_from` on for `test`, whatever the fractions say; without a
    value they are training documents.

    Values are compared as text: dates as ISO 8601 have them, "2026-03" before "2026-03-01T10:00:00Z". A file's last
    change is no date.

    Args:
        column: A column of the documents: "source", or one of the reader's metadata, such as "date" or "url".
        length: Characters at the beginning of a value that are compared; 10 of a date are a day. None: all of it.
        validation_from: Least value of the documents that are held out for validation.
        test_from: Least value of those that are held out for `test`; above `validation_from`.

    Raises:
        ConfigError: If an argument is out of range, or documents have no such column.

    Example:
        data:
          init_args:
            transforms: [{class_path: SplitBy, init_args: {column: source}}]
    """

    def __init__(
        self,
        column: str,
        length: int | None = None,
        validation_from: str | None = None,
        test_from: str | None = None,
    ) -> None:
        if length is not None and length < 1:
            raise ConfigError(f"SplitBy: length is {length}; it is at least 1.")
        if test_from is not None and (validation_from is None or test_from <= validation_from):
            raise ConfigError(
                f"SplitBy: test_from is {test_from!r}, validation_from {validation_from!r}: test needs both, and the later "
                "values."
            )
        self.column, self.length = column, length
        self.validation_from, self.test_from = validation_from, test_from

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options."""
        return vars(self)

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Adds the column that preparation splits by."""
        values = column_of(batch, self.column, "SplitBy").to_pylist()
        if SPLIT_KEY in batch.schema.names:
            raise ConfigError("SplitBy is there twice: a document is in one group.")
        keys = [self._key(value, name) for value, name in zip(values, batch["id"].to_pylist(), strict=True)]
        return batch.append_column(SPLIT_KEY, strings(keys))

    def _key(self, value: str | None, name: str) -> str:
        if self.validation_from is None:
            return f"id {name}" if value is None else f"value {value[: self.length]}"
        if value is None or value < self.validation_from:
            return "train"
        return "validation" if self.test_from is None or value < self.test_from else "test"
