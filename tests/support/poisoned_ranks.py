"""A callback that makes the gradients of some optimizer steps NaN."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class PoisonedSteps(Callback):
    """Makes what the last block passes on going backward NaN.

    Args:
        start: The optimizer step, from 1, from which on it does so.
    """

    def __init__(self, start: int) -> None:
        self.start = start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def poison(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            bad = torch.is_grad_enabled() and trainer.global_step + 1 >= self.start
            return _Poison.apply(output, bad)

        pl_module.network.blocks[-1].register_forward_hook(poison)


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient * torch.nan if ctx.bad else gradient), None
