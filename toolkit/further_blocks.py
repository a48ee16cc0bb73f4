"""Blocks outside of a network that are run as its own: what a network offers to objectives with modules of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["RunsFurtherBlocks", "counterparts", "further_blocks", "set_further_blocks"]

_FURTHER = "_further_blocks"


@runtime_checkable
class RunsFurtherBlocks(Protocol):
    """A network that runs a copy of its last block with the positions and the mask that its own blocks have."""

    def run_further_block(self, block: nn.Module, batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Maps hidden states (B, T, C) to (B, T, C).

        Args:
            block: Called as the last block is.
            batch: As for `forward`.
            hidden: Input of the block (B, T, C).
        """

    def further_block_flops(self, sequence_length: int) -> float:
        """Returns floating-point operations of forward and backward of that, for a token in a row of this many."""


def set_further_blocks(network: Any, blocks: Iterable[nn.Module]) -> None:
    """Notes the copies of the last block that an objective runs, so that a callback finds them.

    They are no modules of the network: its parameters and its checkpoints stay as they are.
    """
    vars(network)[_FURTHER] = list(blocks)


def further_blocks(network: Any) -> list[nn.Module]:
    """Returns the copies of the network's last block that an objective runs; none without such an objective.

    For callbacks that change how each of the network's blocks is computed, or listen to modules of all blocks.
    """
    return list(vars(network).get(_FURTHER, ()))


def counterparts(network: Any, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns, for those of some modules that are in the last block, the same ones of each copy of it."""
    wanted = {id(module) for module in modules}
    copies = further_blocks(network)
    names = [name for name, one in network.blocks[-1].named_modules() if id(one) in wanted] if copies else []
    return [block.get_submodule(name) for block in copies for name in names]
