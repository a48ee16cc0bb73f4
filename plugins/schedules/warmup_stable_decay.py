"""Linear warm-up, a constant learning rate, and a decay at the end."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.schedules.warmup import SQUARE_ROOTS, WarmupSchedule, progress

SHAPES = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    **SQUARE_ROOTS,
}
"""Height of the learning rate, 1 to 0, at a fraction of the decay."""


@technique(
    paper="MiniCPM, arXiv:2404.06395, section 4; a decay of 20% as 1 - sqrt: arXiv:2405.18392, section 3"
)
class WarmupStableDecay(WarmupSchedule):
    """Warm-up, stable, decay (WSD): a linear warm-up, a constant learning rate, and a decay at the end of the run.

    A run can be extended from a checkpoint before the decay: until then nothing depends on its length.

    Args:
        decay_steps: Optimizer steps of the decay; below 1 a fraction of the schedule.
        decay: The shape over T steps, at step t: "linear" 1 - t/T; "cosine" half a cosine; "square_root" 1 - sqrt(t/T),
            steep at first and flat at the end; "square_root_remaining" sqrt((T - t)/T), flat at first and steep at the
            end. Halfway they are at 0.29 and 0.71 of the peak.
        decay_tokens: Tokens of the decay, in place of steps.

    Raises:
        ConfigError: If a value is out of range, warm-up and decay are longer than the schedule, or the schedule is
            longer than the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupStableDecay
            init_args: {warmup_steps: 100, decay_steps: 0.2}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        decay_steps: int | float = 0.2,
        decay: Literal["linear", "cosine", "square_root", "square_root_remaining"] = "square_root",
        min_lr_ratio: float = 0.0,
        *,
        decay_tokens: int | float | None = None,
        **lengths: int | float | None,
    ) -> None:
        if decay not in SHAPES:
            raise ConfigError(
                f"WarmupStableDecay: decay is {decay!r}, not one of {', '.join(SHAPES)}.{nearest(decay, set(SHAPES))}"
            )
        self.shape = SHAPES[decay]
        self.decay_lengths = {"decay_steps": decay_steps, "decay_tokens": decay_tokens}
        super().__init__(optimizer, warmup_steps, min_lr_ratio, **lengths)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns 1 until the decay begins, then min + (1 - min) shape(p) at a fraction p of it."""
        start = end - (self.span.decay if self.span else 0)
        return 1.0 if done <= start else self.between(self.shape(progress(done, start, end)))
