"""Schedules, optimizers and gradients with a mistake, for the fourth set of faults."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Returns a linear warm-up and then half a cosine, from 0 to 1 to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    share = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return (1 + math.cos(math.pi * share)) / 2


class AbsoluteRates(LambdaLR):
    """A schedule whose function returns the rate, as nanoGPT's does, where LambdaLR takes a factor on the rate."""

    def __init__(self, optimizer: Optimizer, peak: float, warmup_steps: int, total_steps: int) -> None:
        super().__init__(optimizer, lambda step: peak * cosine(step, warmup_steps, total_steps))


class HyperbolicDecay(LambdaLR):
    """Warm-up, constant, then a decay as 1 / steps since its begin; the first of these is kept from 0 by a small number."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int, decay_from: int) -> None:
        def factor(step: int) -> float:
            if step < decay_from:
                return min(1.0, (step + 1) / warmup_steps)
            return 1 / max(step - decay_from, 0.05)

        super().__init__(optimizer, factor)


class PositionalAdamW(AdamW):
    """AdamW whose arguments are passed by position, epsilon and weight decay in the wrong order."""

    def __init__(self, params: Any, lr: float, eps: float = 1e-8, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, (0.9, 0.95), weight_decay, eps)


class FullDecayAdamW(AdamW):
    """AdamW whose decay is not multiplied by the learning rate."""

    def step(self, closure: Any = None) -> Any:
        """Steps, and then takes the share `weight_decay` off each weight."""
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["weight_decay"])
        return loss


class AccumulatingAdamW(AdamW):
    """AdamW for accumulation over `every` micro-batches by hand: zeroes gradients at the first, and steps at each."""

    def __init__(self, params: Any, lr: float, every: int) -> None:
        super().__init__(params, lr, (0.9, 0.95), weight_decay=0.1)
        self.every, self.batches = every, 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients where accumulation begins."""
        if self.batches % self.every == 0:
            super().zero_grad(set_to_none)
        self.batches += 1


class SavesWeightsAlone(Callback):
    """Keeps checkpoints small: takes the optimizer's moments out."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Empties the state of each parameter."""
        for state in checkpoint["optimizer_states"]:
            state["state"] = {}


class LossScale(Callback):
    """Computes gradients in float16, with a static loss scale that divides where it should multiply."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Rounds the scaled gradients to float16, and takes the scale off."""
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad = (parameter.grad / self.scale).half().float() * self.scale
