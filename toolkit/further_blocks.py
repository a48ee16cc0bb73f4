"""Blocks outside of a network that are run as its own: what a network offers to objectives with modules of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["RunsFurtherBlocks"]


@runtime_checkable
class RunsFurtherBlocks(Protocol):
    """A network that runs a copy of its last block with the positions and the mask that its own blocks have."""

    def run_further_block(self, block: nn.Module, batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Maps hidden states (B, T, C) to (B, T, C).

        Args:
            block: Called as the last block is.
            batch: As for `forward`.
            hidden: What the block is given.
        """
