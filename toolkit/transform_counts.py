"""What transforms count beside the documents that they drop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class KeepsCounts(Protocol):
    """A transform that counts what it changes or finds, for the report of a prepared folder.

    Example:
        class Shouting(Transform):
            def take_counts(self) -> Mapping[str, int]:
                counts, self._counts = self._counts, Counter()
                return counts
    """

    def take_counts(self) -> Mapping[str, int]:
        """Returns the counts since the last call, by what was counted (one of few); called after each `apply`."""
