"""Data modules whose rows come from several sources, and can say which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["SOURCES", "HasSources"]

SOURCES = "source_ids"
"""Key of a batch, (B, T) int64: the place in `source_tokens` of the source that a row is from; -1: padding."""


@runtime_checkable
class HasSources(Protocol):
    """A data module that mixes sources.

    Attributes:
        source_tokens: Name of each source -> its training tokens, those of one epoch.
    """

    source_tokens: Mapping[str, int]

    def mark_sources(self) -> None:
        """Adds `source_ids` to all batches; called before there are loaders."""
