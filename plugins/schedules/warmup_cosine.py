"""Linear warm-up, then half a cosine."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule, progress


@technique(
    paper="SGDR, arXiv:1608.03983, one cycle; to a tenth of the peak as in GPT-3, arXiv:2005.14165, B",
    maturity="stable",
)
class WarmupCosine(WarmupSchedule):
    """Linear warm-up, then cosine decay of the learning rate to `min_lr_ratio` of its peak.

    The last optimizer step of the run has exactly `min_lr_ratio` times the peak.

    Raises:
        ConfigError: If a value is out of range, the warm-up is as long as the schedule, or the schedule is longer
            than the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupCosine
            init_args: {warmup_steps: 100, min_lr_ratio: 0.1}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        min_lr_ratio: float = 0.1,
        **lengths: int | float | None,
    ) -> None:
        super().__init__(optimizer, warmup_steps, min_lr_ratio, **lengths)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns min + (1 - min) (1 + cos(pi p)) / 2 at a fraction p of the way to the end."""
        return self.between((1 + math.cos(math.pi * progress(done, warmup, end))) / 2)
