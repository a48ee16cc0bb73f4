"""Floating-point operations of training that a network's `flops_per_token` does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from core.contracts import Network

__all__ = ["AddsFlops", "ComputesIn", "CountsFlops"]


@runtime_checkable
class CountsFlops(Protocol):
    """A network that does not compute as many positions as there are label tokens, as encoders do."""

    def flops_of_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Floating-point operations of forward and backward, head included, for a batch of these shapes.

        Only shapes are read: it does not wait for the device.
        """


@runtime_checkable
class AddsFlops(Protocol):
    """An objective that computes with modules of its own."""

    def further_flops_per_token(self, network: Network, sequence_length: int) -> float:
        """Operations of forward and backward that it adds for one token in a row of this many, to those of the network."""


@runtime_checkable
class ComputesIn(Protocol):
    """A strategy that may compute in another data type than the run's precision says.

    Attributes:
        compute_dtype: The data type of matrix products; None: that of the precision.
    """

    compute_dtype: torch.dtype | None
