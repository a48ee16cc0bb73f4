"""Schedules on a trainer's clock: how long the run is, and how many tokens each of its steps takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import Schedule
from core.errors import ConfigError


class ScheduleClock:
    """Tells a schedule what it cannot know by itself.

    Tokens are counted as positions of the batches, padding included: the shapes are known on the host, so
    that no step waits for the device, and every rank comes to the same rate by itself.
    """

    def __init__(self, scheduler: LRScheduler | None, trainer: Any) -> None:
        self._schedule = scheduler if isinstance(scheduler, Schedule) else None
        self._trainer = trainer
        # Under tensor parallelism several ranks read the same rows.
        self._readers = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        self._positions = 0

    def bind(self) -> None:
        """Tells the schedule the length of the run.

        Raises:
            ConfigError: If that is not known.
        """
        if self._schedule is None:
            return
        steps = self._trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ConfigError("The schedule has to know the length of the run: set --trainer.max_steps.")
        self._schedule.bind(int(steps))

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """Counts a micro-batch."""
        self._positions += batch["input_ids"].numel()

    def begin_step(self) -> None:
        """Tells the schedule the tokens of the step that takes the micro-batches counted."""
        if self._schedule is not None:
            self._schedule.begin_step(self._positions * self._readers)
        self._positions = 0

    def agree(self, reduce: Callable[..., Tensor], device: torch.device) -> None:
        """Makes sure that all ranks counted the same tokens, if rates depend on them; waits for the device.

        Raises:
            ConfigError: If they did not: each would go on with a rate of its own.
        """
        schedule, ranks = self._schedule, self._trainer.world_size
        if schedule is None or not schedule.counts_tokens or ranks == 1:
            return
        tokens = schedule.tokens + schedule.step_tokens
        total = float(reduce(torch.tensor(tokens, dtype=torch.float64, device=device), reduce_op="sum"))
        if total != tokens * ranks:
            raise ConfigError(
                f"{type(schedule).__name__} counts tokens, and the ranks' batches have different shapes: this one "
                f"counted {tokens:,}, the mean is {total / ranks:,.0f}.\nGive its lengths in steps, or rows of one "
                "length: --data.packing=BestFit."
            )


def written_settings(optimizer: Optimizer, trainer: Any) -> list[dict[str, Any]]:
    """Returns the settings of each group as the user wrote them, and tells an optimizer the length of the run.

    An optimizer that keeps its state in the groups names those keys in `group_state`. One that has a method
    `bind` has to know the number of optimizer steps.
    """
    if hasattr(optimizer, "bind") and math.isfinite(steps := trainer.estimated_stepping_batches):
        optimizer.bind(int(steps))
    state = {"params", *getattr(optimizer, "group_state", ())}
    return [{k: v for k, v in group.items() if k not in state} for group in optimizer.param_groups]


def prefer_written(
    optimizer: Optimizer, scheduler: LRScheduler | None, written: list[dict[str, Any]]
) -> None:
    """Gives the groups' settings that the user wrote precedence over those of a checkpoint."""
    for group, own in zip(optimizer.param_groups, written, strict=True):
        rate = group["lr"]
        group.update(own)
        if scheduler is not None and not isinstance(scheduler, Schedule):
            group["lr"] = rate  # torch's schedules derive the next rate from the present one


def set_rates(groups: Iterable[dict[str, Any]], rate: float, main: float, written: Iterable[float]) -> None:
    """Sets learning rates as they are where the optimizer's is another: those of groups of their own go with it.

    Args:
        groups: The settings of each group.
        rate: The optimizer's, now.
        main: The optimizer's, as written.
        written: The groups', as written.
    """
    for group, own in zip(groups, written, strict=True):
        group["lr"] = rate if own == main else own / main * rate


def rebuild_at(trainer: Any, rate: float) -> None:
    """Builds optimizer and schedule anew, on every rank, as if the optimizer had been configured with this rate.

    Before the first optimizer step.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop
    configured, loader = module.build_optimizer, loop._combined_loader

    def build(groups: Any) -> Optimizer:
        optimizer: Optimizer = configured(groups)
        own = optimizer.param_groups
        set_rates(own, rate, optimizer.defaults["lr"], [group["lr"] for group in own])
        return optimizer

    module.build_optimizer = build
    trainer.strategy.setup_optimizers(trainer)
    loop._combined_loader = loader  # which building a schedule takes away


def resume_at(trainer: Any, rate: float) -> None:
    """Makes a resumed run go on at such a rate; for `on_train_start` of a callback, on every rank."""
    groups = trainer.lightning_module._user_groups
    set_rates(groups, rate, trainer.optimizers[0].defaults["lr"], [group["lr"] for group in groups])
    for config in trainer.lr_scheduler_configs:
        config.scheduler.base_lrs = [group["lr"] for group in groups]


@contextmanager
def scaled_rates(optimizer: Any, factors: Mapping[str, float]) -> Iterator[None]:
    """Multiplies the learning rates by all of the factors, for as long as a step takes: schedules go on from theirs."""
    factor = math.prod(factors.values())
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True) if factor != 1.0 else ():
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True) if factor != 1.0 else ():
            group["lr"] = rate
