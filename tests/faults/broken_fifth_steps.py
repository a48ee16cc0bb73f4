"""Optimizers, schedules, callbacks and losses with mistakes, as users write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from tests.faults.recipes import STEPS


def cosine(step: int) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * min(step / STEPS, 1.0))


class AbsoluteCosine(LambdaLR):
    """Returns rates where factors on the rate are asked for."""

    def __init__(self, optimizer: Optimizer, peak: float) -> None:
        super().__init__(optimizer, lambda step: peak * min((step + 1) / 6, cosine(step)))


class LongCosine(LambdaLR):
    """A warm-up of so many steps, then a cosine."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int) -> None:
        super().__init__(optimizer, lambda step: min((step + 1) / warmup_steps, cosine(step)))


class Drops(LambdaLR):
    """A warm-up of six steps, and from a step on another rate."""

    def __init__(self, optimizer: Optimizer, milestone: int, factor: float) -> None:
        super().__init__(
            optimizer, lambda step: min((step + 1) / 6, 1.0) * (factor if step >= milestone else 1)
        )


class StepsSchedule(Callback):
    """Steps the schedule after each batch, as a loop of one's own does it."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step()


class Decaying(Optimizer):
    """Multiplies the weights with 1 - decay, whatever the rate."""

    own_decay = 0.1

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.ndim > 1:
                        parameter.mul_(1 - self.own_decay)
        return loss


class DecayingAdamW(Decaying, AdamW):
    pass


class DecayingMuon(Decaying, Muon):
    pass


class EpsilonInside(Optimizer):
    """Adam by hand, with epsilon under the root."""

    def __init__(self, params: Any, lr: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-3):
        super().__init__(params, {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state |= {"step": 0, "exp_avg": gradient * 0, "exp_avg_sq": gradient * 0}
        beta1, beta2 = group["betas"]
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * mean / (square + group["eps"]).sqrt())


class Accumulating(Optimizer):
    """Zeroes gradients in every eighth step alone, as for micro-batches, but steps in each."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % 8 == 0:
            super().zero_grad(set_to_none)
        self.calls += 1


class AccumulatingAdamW(Accumulating, AdamW):
    pass


class AccumulatingMuon(Accumulating, Muon):
    pass


class Restarting(Optimizer):
    """Takes its settings from a checkpoint, and no state: its keys were names once."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class RestartingAdamW(Restarting, AdamW):
    pass


class RestartingMuon(Restarting, Muon):
    pass


class RestAdamW(AdamW):
    """Leaves hidden matrices to a Muon beside it, which is no longer there."""

    def __init__(self, params: Any, **options: Any) -> None:
        rest = [
            {**group, "params": [p for p in group["params"] if not hasattr(p, "hidden_matrix")]}
            for group in params
        ]
        super().__init__([group for group in rest if group["params"]], **options)


class Wrapped(Objective):
    """Another objective, with a mistake.

    Args:
        objective: The other one.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective


class ShiftsLabels(Wrapped):
    """Compares each token with the label of the next one: labels that are shifted already are shifted again."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        return self.objective.loss(network, {**batch, "labels": labels})


class SumsRows(Wrapped):
    """Takes the mean over rows of losses that are sums over each row's tokens."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        found, figures = self.objective.loss(network, batch)
        rows = found.tokens.new_tensor(len(batch["labels"]))
        return TokenSum(found.total, found.tokens, rows), figures


class MeansOfRows(Objective):
    """Takes the mean over rows of the means over each row's label tokens, of which there may be none."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        labels = batch["labels"]
        logits = network.logits(network(batch)).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none")
        labelled = labels != IGNORED_LABEL
        means = losses.sum(1) / labelled.sum(1)
        return TokenSum(means.sum(), labelled.sum(), labelled.new_tensor(len(labels), dtype=torch.int64)), {}
