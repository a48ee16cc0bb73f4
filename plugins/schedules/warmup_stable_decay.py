"""Linear warm-up, a constant rate, and a decay at the end."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule, progress

SHAPES = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "square_root": lambda share: 1 - math.sqrt(share),
}
"""How high the rate stands, 1 to 0, at a share of the decay."""


@technique(
    paper="MiniCPM, arXiv:2404.06395, section 4; a decay of 20% as 1 - sqrt: arXiv:2405.18392, section 3"
)
class WarmupStableDecay(WarmupSchedule):
    """Raises the learning rate linearly, keeps it, and lowers it at the end to `min_lr_ratio` of its peak (WSD).

    A run can be prolonged from a checkpoint before the decay: until there nothing depends on its length.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the schedule; 0 starts there.
        decay_steps: Optimizer steps of the decay; below 1 a fraction of the schedule.
        decay: The shape of the decay: "square_root" is 1 - sqrt.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.
        total_steps: Optimizer steps of the whole schedule, after which the rate stays at its end; below 1 a
            fraction of the run; None: the length of the run.
        warmup_tokens: Tokens until the peak, in place of steps.
        decay_tokens: Tokens of the decay, in place of steps.
        total_tokens: Tokens of the whole schedule, in place of steps. Positions of all ranks, padding included.

    Raises:
        ConfigError: If a value is out of range, warm-up and decay are longer than the schedule, or that is longer
            than the run.

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
        decay: Literal["linear", "cosine", "square_root"] = "square_root",
        min_lr_ratio: float = 0.0,
        total_steps: int | float | None = None,
        warmup_tokens: int | float | None = None,
        decay_tokens: int | float | None = None,
        total_tokens: int | float | None = None,
    ) -> None:
        if decay not in SHAPES:
            raise ConfigError(
                f"WarmupStableDecay: decay is {decay!r}, not one of {', '.join(SHAPES)}.{nearest(decay, set(SHAPES))}"
            )
        self.shape = SHAPES[decay]
        super().__init__(
            optimizer, min_lr_ratio,
            warmup_steps=warmup_steps, decay_steps=decay_steps, total_steps=total_steps,
            warmup_tokens=warmup_tokens, decay_tokens=decay_tokens, total_tokens=total_tokens,
        )  # fmt: skip

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns 1 until the decay begins, then min + (1 - min) shape(p) at a share p of it."""
        start = end - (self.span.decay if self.span else 0)
        return 1.0 if done <= start else self.between(self.shape(progress(done, start, end)))
