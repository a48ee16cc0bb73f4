"""Linear warm-up, then a decay along a square root."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer

from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.schedules.warmup import SQUARE_ROOTS, WarmupSchedule, progress


@technique(paper="the decay of arXiv:2405.18392, section 3, over the full run")
class WarmupSquareRoot(WarmupSchedule):
    """Linear warm-up, then square-root decay of the learning rate to `min_lr_ratio` of its peak.

    Over the T steps of the decay, at step t, `decay` is 1 - sqrt(t/T), which falls fast at first and slowly towards
    the end, or sqrt((T - t)/T), which falls slowly at first and fast at the end (a polynomial decay of power 0.5). Halfway
    they are at 0.29 and 0.71 of the peak.

    Args:
        decay: "square_root" is 1 - sqrt(t/T), "square_root_remaining" sqrt((T - t)/T).

    Raises:
        ConfigError: If a value is out of range, `decay` is unknown, the warm-up is as long as the schedule, or the
            schedule is longer than the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupSquareRoot
            init_args: {warmup_steps: 100, min_lr_ratio: 0.0}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        min_lr_ratio: float = 0.0,
        *,
        decay: Literal["square_root", "square_root_remaining"] = "square_root",
        **lengths: int | float | None,
    ) -> None:
        if decay not in SQUARE_ROOTS:
            raise ConfigError(
                f"WarmupSquareRoot: decay is {decay!r}, not one of {', '.join(SQUARE_ROOTS)}."
                f"{nearest(decay, set(SQUARE_ROOTS))}"
            )
        self.shape = SQUARE_ROOTS[decay]
        super().__init__(optimizer, warmup_steps, min_lr_ratio, **lengths)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns min + (1 - min) shape(p) at a fraction p of the way to the end."""
        return self.between(self.shape(progress(done, warmup, end)))
