"""AdamW with 8-bit moments."""

from __future__ import annotations

from typing import Any

from core.technique import Package, technique
from plugins.optimizers.block_shards import StepsShards
from plugins.optimizers.libraries import library, unwrapped


@technique(
    paper="8-bit optimizers via block-wise quantization, arXiv:2110.02861; bitsandbytes",
    needs=(Package("bitsandbytes>=0.48"),),
)
class AdamW8bit(StepsShards, library("bitsandbytes").optim.AdamW8bit):  # type: ignore[misc]
    """AdamW whose two moments are stored in 8 bits each, in blocks of 256 with one scale each.

    State: about 2 bytes per parameter of a tensor of 4,096 or more elements; 8 bytes in smaller ones.
    Of sharded weights each rank steps its shard, with the same blocks; where shards are not made of whole blocks (rows of
    all ranks alike, a multiple of 256 elements on each; never the columns that tensor parallelism cuts), 8 bytes.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: AdamW8bit
            init_args: {lr: 6.0e-4, betas: [0.9, 0.95], weight_decay: 0.1}
    """

    paged = False
    """Whether the state is kept in unified memory."""

    def __init__(
        self,
        params: Any,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, is_paged=self.paged
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict; each tensor of a parameter has its own name."""
        found = unwrapped(super().state_dict())
        return {**found, "state": self.sharded_states(found["state"])}
