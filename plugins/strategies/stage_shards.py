"""Sharded weights of pipeline stages: gathered once a step, their gradients reduced once a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StageShards(nn.Module):
    """Modules whose weights FSDP gathers as this one runs forward, and whose gradients it reduces as this one runs backward.

    `fully_shard` is applied to this module, and the modules run outside of it: a schedule calls them for many micro-batches,
    and may compute gradients of weights apart from those of inputs, which hooks around each call would miss.

    Args:
        parts: The modules, and others of this class.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, signal: Tensor) -> Tensor:
        """Returns a tensor, 0-d; gradients of all weights are reduced when it is differentiated."""
        for part in self.parts:
            if isinstance(part, StageShards):
                signal = part(signal)
        return signal.clone()  # FSDP hangs its hooks on it, which a view may lose


def sum_in_float32(stage: nn.Module) -> None:
    """Lets gradients of gathered weights of two bytes add up in float32: a step has too many micro-batches for less."""
    for parameter in stage.parameters():
        if parameter.element_size() < 4:
            parameter.grad_dtype = torch.float32  # before they are reduced, in the data type that this takes
