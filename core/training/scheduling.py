"""Schedules on a trainer's clock: how long the run is, and how many tokens each of its steps takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import Schedule
from core.errors import ConfigError


class ScheduleClock:
    """Tells a schedule what it cannot know by itself.

    Tokens are counted as positions of the batches, padding included: the shapes are known on the host, so
    that no step waits for the device, and every rank comes to the same rate by itself.

    Attributes:
        positions: Those of this rank's micro-batches of the coming step so far.
    """

    def __init__(self, scheduler: LRScheduler | None, trainer: Any) -> None:
        self._schedule = scheduler if isinstance(scheduler, Schedule) else None
        self._trainer = trainer
        # Under tensor parallelism several ranks read the same rows.
        self._dp_size = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        self.positions = 0

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
        self.positions += batch["input_ids"].numel()

    def begin_step(self) -> None:
        """Tells the schedule the tokens of the step that takes the micro-batches counted."""
        if self._schedule is not None:
            self._schedule.begin_step(self.positions * self._dp_size)
        self.positions = 0

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


@contextmanager
def scaled_lrs(optimizer: Any, factors: Mapping[str, float]) -> Iterator[None]:
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
