"""Input that a reader leaves out because it is of another kind, not because it is broken."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable


@runtime_checkable
class SkipsInput(Protocol):
    """A reader whose source also holds what is no document, such as the redirects of a web archive.

    It calls `reject` for these with one of the reasons in `skipped`. They are counted in the report, by reason; they do not
    count for `max_reject_fraction` and are not listed in rejects.jsonl.

    Attributes:
        skipped: Reasons for which `reject` is called with input that is as it should be.

    Example:
        class Letters(Reader):
            skipped = ("an envelope",)
    """

    @property
    def skipped(self) -> Collection[str]:
        """The reasons."""
