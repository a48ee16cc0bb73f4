"""Base class of the schedules with a linear warm-up: arguments, lengths of the phases, position of a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from core.contracts import Schedule
from core.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

Length = int | float
"""A number of steps or tokens. A value between 0 and 1 is a fraction of the schedule."""


class Span(NamedTuple):
    """The lengths of a schedule's phases, in one unit.

    Attributes:
        warmup: Length of the warm-up.
        decay: Length of the decay at the end; 0 if the schedule has none.
        end: Length of the schedule; infinite if it has no end.
        unit: "steps" or "tokens".
    """

    warmup: float
    decay: float
    end: float
    unit: str

    def fault(self, run: float) -> str | None:
        """Returns why the phases do not fit into the schedule or the run, or None.

        Args:
            run: Length of the run in the same unit; 0 if unknown.
        """
        key, end, unit = "--model.lr_scheduler.", self.end, self.unit
        if end == float("inf"):
            end = run
        if 1 < run < end:
            return (
                f"total_{unit} is {end:,.0f}, and the run has only {run:,.0f} {unit}: it would end before the schedule.\n"
                f"Set {key}total_{unit} to {run:.0f} or less, or train for longer."
            )
        if end <= 1 or (self.warmup < end and self.warmup + self.decay <= end):
            return None
        decay = f" and decay_{unit} {self.decay:,.0f}" if self.decay else ""
        fix = f"{key}warmup_{unit} to less than {end:.0f}"
        if self.decay:
            fix = f"{key}warmup_{unit} and {key}decay_{unit} to {end:.0f} together or less"
        scope = "schedule" if self.end == end else "run"
        return (
            f"warmup_{unit} is {self.warmup:,.0f}{decay}, and the {scope} has only {end:,.0f} {unit}.\n"
            f"Set {fix}, or train for longer."
        )


def span_of(given: Mapping[str, Any], run_steps: float) -> Span:
    """Resolves fractions and defaults of a schedule's arguments for a run of `run_steps` steps.

    Raises:
        ConfigError: If a length is out of range, or lengths mix steps and tokens.
    """
    in_tokens = any(given.get(f"{part}_tokens") is not None for part in ("warmup", "decay", "total"))
    unit = "tokens" if in_tokens else "steps"
    if in_tokens:
        end = _checked("total_tokens", given.get("total_tokens") or float("inf"))
    else:
        end = _checked(
            "total_steps", given["total_steps"] if given.get("total_steps") is not None else run_steps
        )
        end = end if end >= 1 else max(round(end * run_steps), 1)
    parts = []
    for part in ("warmup", "decay"):
        length = given.get(f"{part}_{unit}")
        if length is None:  # the schedule counts tokens, this phase is given in steps
            length = given.get(f"{part}_steps") or 0
            if length >= 1:
                raise ConfigError(
                    f"{part}_steps is {length}, but the schedule counts tokens. Give {part}_tokens "
                    f"too, or {part}_steps as a fraction, such as 0.01."
                )
        length = _checked(f"{part}_{unit}", length)
        if 0 < length < 1:
            length = length * end if in_tokens else round(length * end)
        parts.append(length)
    return Span(parts[0], parts[1], end, unit)


def _checked(name: str, length: Length) -> Length:
    least = {"total_tokens": 1, "total_steps": 1e-9}.get(name, 0)
    if not length >= least:
        raise ConfigError(f"{name} is {length}: it takes a count, or a fraction of the run below 1.")
    if name.endswith("_steps") and length > 1 and length != int(length) and length != float("inf"):
        raise ConfigError(
            f"{name} is {length}: a number of steps is an integer, a fraction of the run below 1."
        )
    return length


class WarmupSchedule(Schedule, ABC):
    """Raises the learning rate linearly to its peak; subclasses define the rest in :meth:`after_warmup`.

    The learning rate of a step depends on the steps done after it. With a warm-up of 10 steps, step 1 has a tenth of
    the peak and step 10 has the peak. The last step of the schedule has exactly the final value, and later steps
    keep it. In tokens it is the same, with the tokens of each global batch in place of 1.

    Subclasses inherit these arguments and their descriptions. They describe what they add or change.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the schedule; 0 starts at the peak.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.
        total_steps: Optimizer steps of the schedule, after which the learning rate stays constant; below 1 a
            fraction of the run; None: the length of the run.
        warmup_tokens: Tokens until the peak, in place of steps.
        total_tokens: Tokens of the schedule, in place of steps. All positions on all ranks count, with padding.

    Raises:
        ConfigError: If a value is out of range, the phases are longer than the schedule, or that is longer than
            the run.
    """

    ends = True
    """Whether the learning rate depends on where the schedule ends."""

    decay_lengths: Mapping[str, Length | None] = {}
    """`decay_steps` and `decay_tokens` of a subclass with a phase at the end; set before `super().__init__`."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        min_lr_ratio: float = 0.0,
        total_steps: int | float | None = None,
        warmup_tokens: int | float | None = None,
        total_tokens: int | float | None = None,
    ) -> None:
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f"{type(self).__name__} takes min_lr_ratio from 0 to 1, not {min_lr_ratio}.")
        self.min_lr_ratio = min_lr_ratio
        steps = {"warmup_steps": warmup_steps, "total_steps": total_steps}
        tokens = {"warmup_tokens": warmup_tokens, "total_tokens": total_tokens}
        self.given = {**steps, **tokens, **self.decay_lengths}
        self.span: Span | None = None
        self.counts_tokens = self._span(self.given, 1e9).unit == "tokens"
        super().__init__(optimizer)

    @classmethod
    def _span(cls, given: Mapping[str, Any], run_steps: float) -> Span:
        try:
            span = span_of(given, run_steps)
        except ConfigError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from None
        if cls.ends and span.end == float("inf"):
            raise ConfigError(
                f"{cls.__name__} has warmup_tokens and no total_tokens: set --model.lr_scheduler.total_tokens to the "
                "tokens of the schedule.\n`python -m core plot-schedule` prints how many the run has."
            )
        if span.unit == "tokens" and span.warmup == float("inf"):
            raise ConfigError(
                f"{cls.__name__}: the warm-up is a fraction of a schedule without an end. Set "
                "--model.lr_scheduler.warmup_tokens to a number of tokens."
            )
        return span

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields which phase is too long for the run, if `trainer.max_steps` is set."""
        steps = run.argument("trainer.max_steps") or 0
        if run.argument("trainer.fast_dev_run") or steps < 1:
            return
        span = cls._span(own.arguments, steps)
        fault = span.fault(steps if span.unit == "steps" else steps * _step_tokens(run))
        if fault:
            yield fault

    def bind(self, total_steps: int) -> None:
        """Sets the length of the run, in optimizer steps."""
        span = self._span(self.given, total_steps)
        if fault := span.fault(total_steps if span.unit == "steps" else 0):
            raise ConfigError(f"{type(self).__name__}: {fault}")
        self.span = span
        super().bind(total_steps)

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rate of the current step for each parameter group."""
        factor = self.factor()
        return [peak * factor for peak in self.base_lrs]

    def factor(self) -> float:
        """Returns the factor on the peak learning rate for the current step."""
        if self.span is None:
            return 1.0
        here = self.step_tokens if self.counts_tokens else 1
        done = (self.tokens if self.counts_tokens else self.last_epoch) + here
        warmup = max(self.span.warmup, here)  # without a warm-up, the first step has the peak
        if done < warmup:
            return done / warmup
        return self.after_warmup(min(done, self.span.end), warmup, self.span.end) if done else 1.0

    @abstractmethod
    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns the factor on the peak after `done` steps or tokens, between `warmup` (factor 1) and `end`."""

    def between(self, height: float) -> float:
        """Returns the factor at a height between `min_lr_ratio` (0) and the peak (1)."""
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * height


SQUARE_ROOTS: dict[str, Callable[[float], float]] = {
    "square_root": lambda share: 1 - math.sqrt(share),
    "square_root_remaining": lambda share: math.sqrt(1 - share),
}
"""Height of the learning rate, 1 to 0, at the fraction t/T of a decay: 1 - sqrt(t/T) and sqrt((T - t)/T)."""


def progress(done: float, start: float, end: float) -> float:
    """Returns the fraction of the way from `start` (0) to `end` (1)."""
    return (done - start) / (end - start) if end > start else 0.0


def _step_tokens(run: Run) -> float:
    """Returns the tokens of a global batch, or 0 if the configuration does not determine them."""
    if any(
        {"batch_size", "sequence_length", "gradient_accumulation"} & {*i.declaration.owns}
        for i in run.selected
    ):
        return 0
    rows = (run.argument("data.batch_size") or 0) * (run.argument("trainer.accumulate_grad_batches") or 1)
    return rows * (run.argument("data.sequence_length") or 0) * run.world_size
