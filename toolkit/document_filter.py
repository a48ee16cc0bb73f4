"""Transforms that drop documents one by one, each for a reason that its own text gives."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow

from core.contracts import Transform
from core.errors import ConfigError
from toolkit.arrow_columns import flags


class DocumentFilter(Transform):
    """A transform that looks at one document at a time, and keeps it unchanged or drops it.

    A subclass implements :meth:`reason`. Its public attributes are its options: they are its :meth:`fingerprint`.

    Example:
        class LongEnough(DocumentFilter):
            def __init__(self, min_characters: int = 200) -> None:
                self.min_characters = min_characters

            def reason(self, text: str) -> str | None:
                return "too short" if len(text) < self.min_characters else None
    """

    @abstractmethod
    def reason(self, text: str) -> str | None:
        """Returns why a document is dropped, one of few reasons; None: it is kept."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options: all public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def apply(self, batch: pyarrow.RecordBatch, drop: Callable[..., None]) -> pyarrow.RecordBatch:
        """Drops the documents that have a reason."""
        reasons = [self.reason(text) for text in batch["text"].to_pylist()]
        rows = defaultdict(list)
        for row, reason in enumerate(reasons):
            if reason is not None:
                rows[reason].append(row)
        for reason, dropped in rows.items():
            drop(reason, dropped)
        return batch.filter(flags([reason is None for reason in reasons])) if rows else batch


def check_thresholds(stage: Transform, shares: Collection[str] = ()) -> None:
    """Checks the numbers among the public attributes of a transform, its options.

    Args:
        stage: The transform.
        shares: Names of those that are at most 1; all are at least 0.

    Raises:
        ConfigError: If one is out of range.
    """
    for name, value in vars(stage).items():
        if name.startswith("_") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (value >= 0 and (name not in shares or value <= 1)):
            limits = "between 0 and 1" if name in shares else "at least 0"
            raise ConfigError(f"{type(stage).__name__}: {name} is {value}. It has to be {limits}.")
