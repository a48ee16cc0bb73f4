"""Sequence-length warm-up: short rows first, longer ones later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from core.errors import ConfigError
from core.technique import technique
from toolkit.batch_shapes import Shape, ShapeSchedule

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="Sequence length warm-up: Li et al., arXiv:2108.06084, section 4: linear, from 8 (millions of parameters) or "
    "64 (billions), multiples of 8",
    owns=("sequence_length",),
    conflicts={
        "BatchSizeRamp": "with constant tokens per step the length decides how many rows there are, and the ramp too"
    },
)
class SequenceLengthSchedule(ShapeSchedule):
    """Sequence-length warm-up: rows grow to `data.sequence_length`, without losing or repeating a token.

    Short rows cost less attention, and early in training little is learned from distant tokens. The length of a step
    depends on its number alone. A compiled network is compiled at most once for each length: linear growth has
    up to `data.sequence_length / multiple` of them. Validation is always on full rows.

    Args:
        start: First length, in tokens.
        duration: Until rows are full: optimizer steps (an integer), or a share of the run (below 1.0).
        growth: "linear" (cut down to a multiple), "doubling" (each length as long as the others), or "stages".
        multiple: Lengths of linear growth are multiples of it.
        stages: For growth "stages": the lengths before the full one, rising, each as long as the others.
        keep: "tokens": each full row is replaced by as many short ones as fit into it; "batch": as many rows.
            The tokens of a step depend neither on the number of ranks nor on the micro-batch, and a micro-batch
            never holds more than the configured one. Lengths that divide the full one ("doubling") leave no
            room unused; 40 of 64 tokens, of which one row fits, leave 24 to later steps.
        intermittent_short: Share of the steps after the growth that use one of the shorter lengths again, in
            turn; from 0 to 1.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: SequenceLengthSchedule
              init_args: {start: 8, duration: 0.3}
    """

    def __init__(
        self,
        start: int = 8,
        duration: int | float = 0.3,
        growth: Literal["linear", "doubling", "stages"] = "linear",
        multiple: int = 8,
        stages: list[int] | None = None,
        keep: Literal["tokens", "batch"] = "tokens",
        intermittent_short: float = 0.0,
    ) -> None:
        super().__init__()
        self.start, self.duration, self.growth, self.multiple = start, duration, growth, multiple
        self.stages, self.keep, self.intermittent_short = stages or [], keep, intermittent_short
        if faults := list(self._faults()):
            raise ConfigError("SequenceLengthSchedule: " + "; ".join(faults) + ".")

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what does not fit the data's rows and the run's length."""
        full, steps = run.argument("data.sequence_length"), run.argument("trainer.max_steps")
        duration = own.arguments.get("duration", 0.3)
        longest = max([own.arguments.get("start", 8), *(own.arguments.get("stages") or [])])
        if isinstance(full, int) and longest > full:
            yield f"it begins with rows of {longest} tokens, longer than --data.sequence_length={full}"
        if isinstance(duration, int) and isinstance(steps, int) and 0 < steps < duration:
            yield f"duration is {duration} steps, the run {steps}: rows would never be full; lower it"
        if isinstance(duration, float) and steps == -1:
            yield "duration is a share of the run, whose length is not known: set --trainer.max_steps"

    def _faults(self) -> Iterator[str]:
        if self.start < 1 or self.multiple < 1:
            yield f"start and multiple are at least 1, not {self.start} and {self.multiple}"
        share = isinstance(self.duration, float)
        if self.duration < 0 or (share and self.duration >= 1):
            yield f"duration is steps (an integer) or a share of the run below 1.0, not {self.duration}"
        if (self.growth == "stages") != bool(self.stages):
            yield "stages are given with growth=stages, and with it alone"
        if any(a >= b for a, b in pairwise(self.stages)) or min(self.stages, default=1) < 1:
            yield f"stages rise, from 1 at least, not {self.stages}"
        if not 0 <= self.intermittent_short <= 1:
            yield f"intermittent_short is a share from 0 to 1, not {self.intermittent_short}"

    def shape(self, step: int, tokens: int, steps: int, full: Shape) -> Shape:
        """Returns the shape of a step; see `ShapeSchedule`."""
        growing = self.duration if isinstance(self.duration, int) else round(self.duration * max(steps, 0))
        length = self.length(step, growing, full.sequence_length)
        rows = full.batch_size
        if self.keep == "tokens":  # by row: by micro-batch the layout would decide how much is rounded off
            rows *= full.sequence_length // length
        return Shape(length, rows, full.accumulated)

    def length(self, step: int, growing: int, full: int) -> int:
        """Returns the tokens in a row of a step, counted from 0, of which `growing` have shorter rows than `full`."""
        if step < growing and self.growth == "linear":
            length = self.start + (full - self.start) * step / growing
            return min(max(int(length // self.multiple) * self.multiple, self.start), full)
        since = step - growing
        number = math.floor((since + 1) * self.intermittent_short)
        short = since < 0 or number > math.floor(since * self.intermittent_short)
        if not short or not (lengths := self._lengths(full)):
            return full
        return lengths[step * len(lengths) // growing if since < 0 else (number - 1) % len(lengths)]

    def _lengths(self, full: int) -> list[int]:
        """Returns the lengths before the full one."""
        if self.growth == "stages":
            return [length for length in self.stages if length < full]
        if self.growth == "doubling":
            doublings = math.ceil(math.log2(full / self.start)) if full > self.start else 0
            return [self.start * 2**number for number in range(doublings)]
        first = -(-(self.start + 1) // self.multiple) * self.multiple
        return [self.start, *range(first, full, self.multiple)] if full > self.start else []
