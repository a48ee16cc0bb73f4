"""Weights that a run starts from: what a network says about them, and who is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["MayLackWeights", "SeesWeights"]


@runtime_checkable
class MayLackWeights(Protocol):
    """A network that may start from weights without some of its parts, such as a head for training.

    Attributes:
        may_lack: Beginnings of the names of those parts' weights; they begin as in a new network.
    """

    may_lack: Sequence[str]


@runtime_checkable
class SeesWeights(Protocol):
    """A callback that is shown the weights of `model.weights`, where it changed the network on the meta device."""

    def see_weight(self, name: str, value: Tensor) -> None:
        """Is called on rank 0 with each tensor of the network, whole, before training.

        Args:
            name: In the network.
            value: With which it begins, on any device.
        """
