"""Lion with an 8-bit momentum."""

from __future__ import annotations

from typing import Any

from core.technique import Package, technique
from plugins.optimizers.block_shards import StepsShards
from plugins.optimizers.libraries import library, unwrapped


@technique(
    paper="Lion, arXiv:2302.06675, algorithm 2, with the states of arXiv:2110.02861; bitsandbytes",
    needs=(Package("bitsandbytes>=0.48"),),
)
class Lion8bit(StepsShards, library("bitsandbytes").optim.Lion8bit):  # type: ignore[misc]
    """Lion whose momentum is stored in 8 bits, in blocks of 256 with one scale each.

    State: about 1 byte per parameter of a tensor of 4,096 or more elements; 4 bytes in smaller ones.
    Of sharded weights each rank steps its shard, with the same blocks; 4 bytes where shards are not made of whole blocks.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Weights of the old momentum in the update and in the new momentum.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: Lion8bit
            init_args: {lr: 1.0e-4, betas: [0.9, 0.99], weight_decay: 1.0}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=tuple(betas), weight_decay=weight_decay)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict; each tensor of a parameter has its own name."""
        found = unwrapped(super().state_dict())
        return {**found, "state": self.sharded_states(found["state"])}
