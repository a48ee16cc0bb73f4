"""AdamW without a learning rate schedule: an average of the weights takes its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from core.technique import Package, technique
from core.training.shards import local_tensors
from plugins.optimizers.fused_update import FusesUpdate
from plugins.optimizers.half_precision import ChecksEps
from plugins.optimizers.libraries import library, not_with_lightnings
from plugins.optimizers.own_shards import StepsOwnShards
from toolkit.shards import is_sharded

AdamWScheduleFree: Any = library("schedulefree").AdamWScheduleFree


@technique(
    paper="The Road Less Scheduled, arXiv:2405.15682, algorithm 1; the authors' package schedulefree",
    needs=(Package("schedulefree>=1.4", extra="optimizers"),),
    conflicts=not_with_lightnings("their checkpoints hold one set of weights, this has two"),
    owns=("learning_rate",),
)
class ScheduleFreeAdamW(FusesUpdate, ChecksEps, StepsOwnShards, AdamWScheduleFree):  # type: ignore[misc]
    """Schedule-Free AdamW: a running average of the weights, which replaces the decay of a learning rate schedule.

    Validation and checkpoints use the average; training continues from the exact trained weights. After a linear
    warm-up the learning rate is constant: run it without `lr_scheduler`. State: 8 bytes per float32 parameter, and 4
    more while validating or saving; sharded as the weights are. A checkpoint in one file gathers the weights three times.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate; the paper uses 1 to 10 times the peak of a schedule.
        betas: Weight of the average in the point where gradients are computed; decay rate of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.
        warmup_steps: Optimizer steps of the linear warm-up.

    Example:
        model:
          optimizer:
            class_path: ScheduleFreeAdamW
            init_args: {lr: 2.5e-3, warmup_steps: 100}
          lr_scheduler: null
    """

    group_state = ("k", "train_mode", "weight_sum", "lr_max", "scheduled_lr")
    """Keys of the parameter groups that change from step to step."""

    written = ("exp_avg_sq", "z")
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, warmup_steps=warmup_steps
        )
        self._kept: list[Tensor] = []
        self._set_mode(training=True)

    @property
    def in_training(self) -> bool:
        """Whether the parameters hold the trained weights, not their average."""
        return bool(self.param_groups[0]["train_mode"])

    @torch.no_grad()
    def eval(self) -> None:
        """Copies the average into the parameters."""
        if self.in_training:
            self._kept = [parameter.clone() for parameter in self.all_parameters()]
            sharded = is_sharded(self._kept)
            context: AbstractContextManager[None] = self.on_own_shards() if sharded else nullcontext()
            with context:
                super().eval()

    @torch.no_grad()
    def train(self) -> None:
        """Restores the trained weights exactly."""
        if not self.in_training:
            for parameter, value in zip(self.all_parameters(), self._kept, strict=bool(self._kept)):
                parameter.copy_(value)
            self._kept = []
            self._set_mode(training=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict, with states of shards as DTensors."""
        found = super().state_dict()
        return {**found, "state": self.sharded_states(found["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the states of full tensors, or of shards that the strategy has cut from them."""
        state = {
            number: {name: local_tensors([value])[0] for name, value in own.items()}
            for number, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def begin(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> Sequence[float]:
        """See `FusesUpdate`."""
        for parameter in parameters:
            if not self.state[parameter]:
                own = local_tensors([parameter.detach()])[0]
                state = {"z": own.clone(), "exp_avg_sq": torch.zeros_like(own)}
                self.state[parameter].update(state)
        moved: dict[str, Any] = {**group, "params": []}
        groups = self.param_groups
        self.param_groups = [moved]
        try:
            AdamWScheduleFree.step(self)  # without parameters it moves the settings of the group alone
        finally:
            self.param_groups = groups
        group.update({name: moved[name] for name in self.group_state})
        rate, count, (beta1, beta2) = moved["scheduled_lr"], moved["k"], moved["betas"]
        total = moved["weight_sum"]
        share = count ** moved["r"] * moved["lr_max"] ** moved["weight_lr_power"] / total if total else 0.0
        return (
            beta2,
            1 - beta2,
            1 - beta2**count,
            moved["eps"],
            moved["weight_decay"],
            share,
            rate * (beta1 * (1 - share) - 1),
            rate,
        )

    @staticmethod
    def update(
        numbers: Sequence[Tensor], gradient: Tensor, parameter: Tensor, *state: Tensor
    ) -> Sequence[Tensor]:
        """See `FusesUpdate`."""
        beta2, new_square, debias, eps, decay, share, ahead, rate = numbers
        square, z = state
        square = square * beta2 + new_square * gradient * gradient
        step = gradient / ((square / debias).sqrt() + eps) + decay * parameter
        return parameter.lerp(z, share) + ahead * step, square, z - rate * step

    def _set_mode(self, training: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = training
