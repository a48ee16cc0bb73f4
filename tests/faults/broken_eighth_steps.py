"""Optimizers, schedules and callbacks with the mistakes of the eighth set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon


@torch.no_grad()
def _decay(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(1 - group["weight_decay"])


class PaperAdamW(AdamW):
    """Decays the weights as it is written in the paper, whose decay is not times the learning rate."""

    def step(self, closure: Any = None) -> Any:
        """Steps, and decays."""
        loss = super().step(closure)
        _decay(self)
        return loss


class PaperMuon(Muon):
    """See :class:`PaperAdamW`."""

    def step(self, closure: Any = None) -> Any:
        """Steps, and decays."""
        loss = super().step(closure)
        _decay(self)
        return loss


class ScaledAdamW(AdamW):
    """Clips gradients while they are times a loss scale of its own, not after.

    Args:
        params: As :class:`AdamW`, which takes further arguments, too.
        scale: The loss scale.
    """

    def __init__(self, params: Any, scale: float = 2.0**24, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self.scale = scale

    def step(self, closure: Any = None) -> Any:
        """Clips, and steps."""
        loss = closure() if closure is not None else None
        gradients = [
            one.grad for group in self.param_groups for one in group["params"] if one.grad is not None
        ]
        torch._foreach_mul_(gradients, self.scale)
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
        torch._foreach_mul_(gradients, 1 / self.scale)
        super().step()
        return loss


class Accumulating(Optimizer):
    """Zeroes gradients once in so many steps, as a loop does that accumulates, but steps each time."""

    micro_batches = 4
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients, if it is time."""
        if self.calls % self.micro_batches == 0:
            super().zero_grad(set_to_none)
        self.calls += 1


class AccumulatingAdamW(Accumulating, AdamW):
    """See :class:`Accumulating`."""


class AccumulatingMuon(Accumulating, Muon):
    """See :class:`Accumulating`."""


class Stages(LambdaLR):
    """A linear warm-up, then a factor on the rate for each stage of the run.

    Args:
        optimizer: The optimizer.
        warmup_steps: Steps of the warm-up.
        stages: The first step of each stage, from 1, and its factor.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, stages: Sequence[Sequence[float]]) -> None:
        def factor(done: int) -> float:
            step = done + 1
            reached = [value for first, value in stages if first <= step]
            return min(1.0, step / warmup_steps) * reached[-1]

        super().__init__(optimizer, factor)


class LateResize(Callback):
    """Resizes the embedding and the head, as for further tokens, once the optimizer has been built."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes parameters that the optimizer does not know."""
        network = pl_module.network
        for module in (network.embed_tokens, network.lm_head):
            if module is not None:
                module.weight = nn.Parameter(module.weight.detach().clone())


class HalfCheckpoints(Callback):
    """Resumes from a checkpoint whose optimizer state was stored in half precision, to save room."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Rounds it: squares of small gradients become 0."""
        for state in checkpoint["optimizer_states"]:
            for values in state["state"].values():
                rounded = {name: value.half().float() for name, value in values.items() if name != "step"}
                values.update(rounded)


class HotRank(Callback):
    """Rank 1 computes slowly, as a device does that is too hot.

    Args:
        milliseconds: What each of its steps takes longer.
    """

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Waits."""
        if trainer.global_rank == 1:
            time.sleep(self.seconds)
