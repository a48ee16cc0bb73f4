"""The reduce-scatter of FSDP with sums in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from toolkit.ordered_sums import NOTHING, Turn, add_in_order


class OrderedReduceScatter:
    """Adds each rank's gradients to those of the step so far, one rank after the other; for `set_custom_reduce_scatter`.

    What it returns are the sums of the step: FSDP must find no gradients to add them to. It knows one sum, so FSDP must reduce
    the same parameters once in each backward pass.

    Args:
        turn: Of the callback; says when a step, and a backward pass, begins.

    Raises:
        ConfigError: When a backward pass reduces twice, or other parameters than the one before; on every rank.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._total: Tensor | None = None
        self._step = self._number = -1

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sums `input_tensor` of all ranks into `output_tensor`, this rank's part of it."""
        if self.turn.idle:
            input_tensor.fill_(NOTHING)
        last = self._total if self._step == self.turn.step else None
        if last is not None and (self._number == self.turn.number or len(last) != len(output_tensor)):
            raise ConfigError(
                "RankInvariance: the network uses a block several times in a step, or not all parameters of a block in each "
                "micro-batch,\nand FSDP then reduces gradients in parts: take --trainer.strategy=ddp."
            )
        if last is None:
            output_tensor.fill_(NOTHING)
        else:
            output_tensor.copy_(last)
        add_in_order(output_tensor, input_tensor, group)
        self._total, self._step, self._number = output_tensor, self.turn.step, self.turn.number
