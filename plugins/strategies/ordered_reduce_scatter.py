"""The reduce-scatter of FSDP with sums in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.ordered_sums import NOTHING, Turn, add_in_order


class OrderedReduceScatter:
    """Adds each rank's gradients to those of the step so far, one rank after the other; for `set_custom_reduce_scatter`.

    What it returns are the sums of the step: FSDP must find no gradients to add them to.

    Args:
        turn: Of the callback; says when a step begins.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._total: Tensor | None = None
        self._step = -1

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sums `input_tensor` of all ranks into `output_tensor`, this rank's part of it."""
        if self.turn.idle:
            input_tensor.fill_(NOTHING)
        if self._total is None or self._step != self.turn.step:
            output_tensor.fill_(NOTHING)
        else:
            output_tensor.copy_(self._total)
        add_in_order(output_tensor, input_tensor, group)
        self._total, self._step = output_tensor, self.turn.step
