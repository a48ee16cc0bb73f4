"""Batch-size warm-up: small batches first, larger ones later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from core.errors import ConfigError, deprecated
from core.technique import technique
from toolkit.batch_shapes import Shape, ShapeSchedule

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="linear: GPT-3, arXiv:2005.14165, appendix B, 32k to 3.2M tokens; doubling with a rate times sqrt(2): "
    "Merrill et al., arXiv:2505.23971, section 4",
    owns=("batch_size",),
)
class BatchSizeRamp(ShapeSchedule):
    """Batch-size warm-up: grows the batch to the configured size over the first `tokens_until_full` tokens.

    The configured batch (`data.batch_size` rows, times `trainer.accumulate_grad_batches`, times the ranks) is the
    last. Smaller ones have smaller micro-batches and fewer of them: memory never holds more than the configured
    micro-batch. They are rounded to full rows on each rank, at least one. A change of the accumulation may come some
    micro-batches late: Lightning steps where the number of micro-batches in the epoch is divisible by it.

    Args:
        start: Share of the configured batch to begin with, above 0 and at most 1.
        tokens_until_full: Positions of all ranks, padding included, until the batch is full.
        growth: "linear", or "doubling": the batch doubles, each size for as many tokens as the others.
        scale_lr: Whether the learning rate of a step is that of the schedule times the square root of the share
            of the batch, so that it grows by sqrt(2) with each doubling.
        scale_rate: Deprecated: `scale_lr`, if given.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: BatchSizeRamp
              init_args: {start: 0.25, tokens_until_full: 200000, growth: doubling, scale_lr: true}
    """

    def __init__(
        self,
        start: float = 0.01,
        tokens_until_full: int = 4_000_000_000,
        growth: Literal["linear", "doubling"] = "linear",
        scale_lr: bool = False,
        scale_rate: bool | None = None,
    ) -> None:
        super().__init__()
        if scale_rate is not None:
            deprecated("BatchSizeRamp(scale_rate=...)", "scale_lr")
            scale_lr = scale_rate
        if not 0 < start <= 1 or tokens_until_full < 0:
            raise ConfigError(
                "BatchSizeRamp takes start above 0 and at most 1 and tokens_until_full >= 0, not "
                f"{start} and {tokens_until_full}."
            )
        self.start, self.tokens_until_full, self.growth = start, tokens_until_full, growth
        self.scale_lr = scale_lr

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if the run ends before its batch has the full size."""
        steps, rows = run.argument("trainer.max_steps"), run.argument("data.batch_size")
        length, ramp = run.argument("data.sequence_length"), own.arguments.get("tokens_until_full")
        if all(isinstance(number, int) and number > 0 for number in (steps, rows, length, ramp)):
            accumulated = run.argument("trainer.accumulate_grad_batches") or 1
            most = steps * rows * length * accumulated * run.world_size
            if most < ramp:
                yield (
                    f"tokens_until_full is {ramp:,}, and the run has at most {most:,} tokens: its batch would "
                    "never be full; lower it or train for longer"
                )

    def share(self, tokens: int) -> float:
        """Returns the share of the configured batch after so many tokens."""
        if tokens >= self.tokens_until_full:
            return 1.0
        progress = tokens / self.tokens_until_full
        if self.growth == "linear":
            return self.start + (1 - self.start) * progress
        doublings = math.ceil(-math.log2(self.start))
        return min(self.start * 2.0 ** math.floor(progress * doublings), 1.0)

    def shape(self, step: int, tokens: int, steps: int, full: Shape) -> Shape:
        """Returns the shape of a step; see `ShapeSchedule`."""
        rows = max(round(full.batch_size * full.accumulated * self.share(tokens)), 1)
        needed = max(rows / full.batch_size, 1.0)
        accumulated = min(2 ** math.ceil(math.log2(needed)), full.accumulated)
        return Shape(full.sequence_length, min(-(-rows // accumulated), full.batch_size), accumulated)

    def lr_factor(self, tokens: int) -> float:
        """Returns the square root of the share of the batch with `scale_lr`, else 1."""
        return math.sqrt(self.share(tokens)) if self.scale_lr else 1.0
