"""Optimizers, schedules and callbacks as their users wrote them, each with a mistake; for the seventh set of faults."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from plugins.schedules.warmup_cosine import WarmupCosine
from plugins.schedules.warmup_stable_decay import WarmupStableDecay
from tests.faults.recipes import WARMUP

PROCESSES = 4
"""How many processes a schedule was written for."""


class _LoadsGroupsOnly:
    """Loads settings; the moments, which are stored under other names in a new version, are left out."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = {"state": {}, "param_groups": state_dict["param_groups"]}
        super().load_state_dict(groups)  # type: ignore[misc]


class _ClearsOnce:
    """Clears gradients of parameters that a generator yields: after the first time it yields none."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)  # type: ignore[call-arg]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        self.own = (parameter for group in groups for parameter in group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.own:
            parameter.grad = None


class LoadsGroupsOnlyAdamW(_LoadsGroupsOnly, AdamW):
    """An AdamW."""


class LoadsGroupsOnlyMuon(_LoadsGroupsOnly, Muon):
    """A Muon."""


class ClearsOnceAdamW(_ClearsOnce, AdamW):
    """An AdamW."""


class ClearsOnceMuon(_ClearsOnce, Muon):
    """A Muon."""


def rates_as_factors(optimizer: Optimizer) -> LambdaLR:
    """Returns a schedule whose function returns rates; LambdaLR takes factors, and multiplies them with the rate."""
    peak = optimizer.param_groups[0]["lr"]
    return LambdaLR(optimizer, lambda step: peak * min(1.0, (step + 1) / WARMUP))


class _StepsPerProcess:
    """Goes on by a step for each process, as where each has a part of the batches and the schedule counts them all."""

    def step(self, epoch: int | None = None) -> None:
        for _ in range(PROCESSES):
            super().step(epoch)  # type: ignore[misc]


class _SecondPhase:
    """Begins a second phase; its rate is meant as a rate and taken as a factor on the first one's.

    Args:
        begins: Its first step.
        ratio: The factor.
    """

    def __init__(self, optimizer: Optimizer, begins: int, ratio: float, **settings: Any) -> None:
        self.begins, self.ratio = begins, ratio
        super().__init__(optimizer, **settings)  # type: ignore[call-arg]

    def factor(self) -> float:
        found: float = super().factor()  # type: ignore[misc]
        done: int = self.last_epoch  # type: ignore[attr-defined]
        return found * self.ratio if done + 1 >= self.begins else found


class StepsPerProcessWarmupCosine(_StepsPerProcess, WarmupCosine):
    """A cosine."""


class StepsPerProcessWarmupStableDecay(_StepsPerProcess, WarmupStableDecay):
    """A WSD schedule."""


class SecondPhaseWarmupCosine(_SecondPhase, WarmupCosine):
    """A cosine."""


class SecondPhaseWarmupStableDecay(_SecondPhase, WarmupStableDecay):
    """A WSD schedule."""


class Contiguous(Callback):
    """Makes weights contiguous, as new parameters; the optimizer has been built and keeps the old ones."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for module in pl_module.network.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(weight.detach().clone().contiguous()))
