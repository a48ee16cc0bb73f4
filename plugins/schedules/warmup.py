"""What the schedules with a linear warm-up share: their lengths, and where a step stands in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from core.contracts import Schedule
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.selection import Run, Selected

Length = int | float
"""A count of steps or tokens; below 1, if it is not 0, a fraction of the whole schedule."""


class Span(NamedTuple):
    """The lengths of a schedule as counts, in one unit.

    Attributes:
        warmup: Until the peak.
        decay: Of the phase at the end, where there is one.
        end: Of the whole schedule; infinite where it has no end.
        unit: "steps" or "tokens".
    """

    warmup: float
    decay: float
    end: float
    unit: str

    def fault(self, run: float) -> str | None:
        """Returns what of it does not fit together, or into a run of so many steps or tokens; 0: not known."""
        key, end, unit = "--model.lr_scheduler.", self.end, self.unit
        if end == float("inf"):
            end = run
        if 1 < run < end:
            return (
                f"total_{unit} is {end:,.0f}, the run only {run:,.0f} {unit} long: it would end before the schedule.\n"
                f"Set {key}total_{unit} to {run:.0f} or less, or train for longer."
            )
        if end <= 1 or (self.warmup < end and self.warmup + self.decay <= end):
            return None
        decay = f" and decay_{unit} {self.decay:,.0f}" if self.decay else ""
        mend = f"{key}warmup_{unit} to less than {end:.0f}"
        if self.decay:
            mend = f"{key}warmup_{unit} and {key}decay_{unit} to {end:.0f} together or less"
        whole = "schedule" if self.end == end else "run"
        return (
            f"warmup_{unit} is {self.warmup:,.0f}{decay}, the {whole} only {end:,.0f} {unit} long.\n"
            f"Set {mend}, or train for longer."
        )


def span_of(given: Mapping[str, Any], run_steps: float) -> Span:
    """Resolves fractions and defaults of a schedule's arguments for a run of so many steps.

    Raises:
        ConfigError: If lengths are out of range, or in steps and tokens.
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
        if length is None:  # tokens are counted and this phase has no number of them
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
        raise ConfigError(f"{name} is {length}: a number of steps is whole, a fraction of the run below 1.")
    return length


class WarmupSchedule(Schedule, ABC):
    """Raises the rate linearly to its peak; what comes then, a subclass says in :meth:`after_warmup`.

    A step is placed by what has been seen when it is done: with a warm-up of 10 steps the first has a tenth
    of the peak, the tenth the peak, and the last step of the schedule the value of its end, exactly. In
    tokens it is the same, with the tokens of each global batch in the place of 1. Later steps stay at the
    end.

    Args:
        optimizer: Its learning rates are the peaks.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.
        lengths: `warmup_steps`, `decay_steps`, `total_steps` and the same in tokens, as far as there are any.

    Raises:
        ConfigError: If a value is out of range or phases do not fit into the schedule, or that into the run.
    """

    ends = True
    """Whether the rate depends on where the schedule ends."""

    def __init__(self, optimizer: Optimizer, min_lr_ratio: float, **lengths: Length | None) -> None:
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f"{type(self).__name__} takes min_lr_ratio from 0 to 1, not {min_lr_ratio}.")
        self.min_lr_ratio = min_lr_ratio
        self.given = lengths
        self.span: Span | None = None
        self.counts_tokens = self._span(lengths, 1e9).unit == "tokens"
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
                "tokens of the whole schedule.\nHow many the run has, `python -m core plot-schedule` says."
            )
        if span.unit == "tokens" and span.warmup == float("inf"):
            raise ConfigError(
                f"{cls.__name__}: the warm-up is a fraction of a schedule without an end. Set "
                "--model.lr_scheduler.warmup_tokens to a number of tokens."
            )
        return span

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what is too long, a phase or the schedule, where `trainer.max_steps` tells."""
        steps = run.argument("trainer.max_steps") or 0
        if run.argument("trainer.fast_dev_run") or steps < 1:
            return
        span = cls._span(own.arguments, steps)
        fault = span.fault(steps if span.unit == "steps" else steps * _step_tokens(run))
        if fault:
            yield fault

    def bind(self, total_steps: int) -> None:
        """Takes the length of the run."""
        span = self._span(self.given, total_steps)
        if fault := span.fault(total_steps if span.unit == "steps" else 0):
            raise ConfigError(f"{type(self).__name__}: {fault}")
        self.span = span
        super().bind(total_steps)

    def get_lr(self) -> list[float]:
        """Returns the rate of the current step for each parameter group."""
        factor = self.factor()
        return [peak * factor for peak in self.base_lrs]

    def factor(self) -> float:
        """Returns the factor on the peak learning rate for the current step."""
        if self.span is None:
            return 1.0
        here = self.step_tokens if self.counts_tokens else 1
        done = (self.tokens if self.counts_tokens else self.last_epoch) + here
        warmup = max(self.span.warmup, here)  # without one, the first step has the peak
        if done < warmup:
            return done / warmup
        return self.after_warmup(min(done, self.span.end), warmup, self.span.end) if done else 1.0

    @abstractmethod
    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns the factor on the peak after `done` steps or tokens, from `warmup`, where it is 1, to `end`."""

    def between(self, height: float) -> float:
        """Returns the factor at a height between `min_lr_ratio` (0) and the peak (1)."""
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * height


def progress(done: float, start: float, end: float) -> float:
    """Returns how far it is from `start` (0) to `end` (1)."""
    return (done - start) / (end - start) if end > start else 0.0


def _step_tokens(run: Run) -> float:
    """Returns the tokens of a global batch as far as the configuration tells, else 0."""
    if any(
        {"batch_size", "sequence_length", "gradient_accumulation"} & {*i.declaration.owns}
        for i in run.selected
    ):
        return 0
    rows = (run.argument("data.batch_size") or 0) * (run.argument("trainer.accumulate_grad_batches") or 1)
    return rows * (run.argument("data.sequence_length") or 0) * run.world_size
