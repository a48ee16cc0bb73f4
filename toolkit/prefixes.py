"""Prefixes: first tokens of a document that see each other in both directions; what a network offers that attends so."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["PREFIX", "AttendsToPrefixes"]

PREFIX = "prefix"
"""Key of a batch: which tokens are in the prefix of their document, (B, T) bool."""


@runtime_checkable
class AttendsToPrefixes(Protocol):
    """A network that reads `PREFIX` from a batch: tokens of a prefix see all of that prefix, others all before them.

    Nothing passes between documents. A network without this would ignore the key: an objective asks first.

    Attributes:
        attends_to_prefixes: Whether it does so with its arguments.
    """

    @property
    def attends_to_prefixes(self) -> bool:
        """See the class."""
