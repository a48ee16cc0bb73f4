"""Optimizers and schedules that each break a promise."""

import math

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import Schedule
from core.technique import technique


class Sound(Optimizer):
    """Momentum with decoupled weight decay."""

    sign = -1.0

    def __init__(self, params, lr: float = 0.01, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.mean_of(parameter)
                mean.lerp_(parameter.grad, 0.5)
                parameter.mul_(1 - group["lr"] * self.decay_of(group))
                parameter.add_(mean, alpha=self.sign * group["lr"])
        return loss

    def decay_of(self, group):
        return group["weight_decay"]

    def mean_of(self, parameter):
        return self.state[parameter].setdefault("mean", torch.zeros_like(parameter))


class Climbing(Sound):
    sign = 1.0


class DecayingAll(Sound):
    """Decays every group by what the constructor was given, or a default."""

    def decay_of(self, group):
        return 0.1


class Nested(Sound):
    """Keeps its state in a dictionary of its own within the state, which sharded checkpoints cannot hold."""

    def mean_of(self, parameter):
        return self.state[parameter].setdefault("moments", {"mean": torch.zeros_like(parameter)})["mean"]


class Forgetting(Sound):
    """Keeps its means beside the state: they are not saved."""

    def mean_of(self, parameter):
        self.means = getattr(self, "means", {})
        return self.means.setdefault(parameter, torch.zeros_like(parameter))


class Negative(LRScheduler):
    """A cosine that goes below zero."""

    def __init__(self, optimizer, period: int = 100):
        self.period = period
        super().__init__(optimizer)

    def get_lr(self):
        return [peak * math.cos(2 * math.pi * self.last_epoch / self.period) for peak in self.base_lrs]


class Absolute(LRScheduler):
    """Knows better than the optimizer which rate is the peak."""

    def __init__(self, optimizer, peak: float = 0.1):
        self.peak = peak
        super().__init__(optimizer)

    def get_lr(self):
        return [self.peak / (1 + self.last_epoch) for _ in self.base_lrs]


class Restarting(LRScheduler):
    """Counts its steps itself, where no checkpoint sees it."""

    def __init__(self, optimizer):
        self.seen = [0]
        super().__init__(optimizer)

    def get_lr(self):
        self.seen[0] += 1
        return [peak / self.seen[0] for peak in self.base_lrs]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


class BoundOnce(Schedule):
    """Takes the first length that it is told for good."""

    total_steps = None

    def bind(self, total_steps):
        super().bind(self.total_steps or total_steps)

    def get_lr(self):
        return [peak * (1 - self.last_epoch / (self.total_steps or 10**9)) for peak in self.base_lrs]


@technique(paper="own work", offers=["elementwise"])
class Elementwise(Sound):
    """The same, which treats each weight by itself: sound."""


@technique(paper="own work", offers=["elementwise"])
class Normed(Sound):
    """Says that it treats each weight by itself, and divides by the norm of a tensor."""

    def mean_of(self, parameter):
        mean = super().mean_of(parameter)
        parameter.grad.div_(parameter.grad.norm())
        return mean


@technique(paper="own work", offers=["elementwise"])
class Averaging(Sound):
    """Says that it treats each weight by itself, and takes the mean of a tensor's gradient away."""

    def mean_of(self, parameter):
        parameter.grad.sub_(parameter.grad.mean())
        return super().mean_of(parameter)
