"""What a network says about weights that a run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["MayLackWeights"]


@runtime_checkable
class MayLackWeights(Protocol):
    """A network that may start from weights without some of its parts, such as a head for training.

    Attributes:
        may_lack: Beginnings of the names of those parts' weights; they begin as in a new network.
    """

    may_lack: Sequence[str]
