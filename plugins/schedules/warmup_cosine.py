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
    """Raises the learning rate linearly, then lowers it along half a cosine to `min_lr_ratio` of its peak.

    The last optimizer step of the run has exactly `min_lr_ratio` times the peak.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the schedule; 0 starts there.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.
        total_steps: Optimizer steps of the whole schedule, after which the rate stays at its end; below 1 a
            fraction of the run; None: the length of the run.
        warmup_tokens: Tokens until the peak, in place of steps.
        total_tokens: Tokens of the whole schedule, in place of steps. Positions of all ranks, padding included.

    Raises:
        ConfigError: If a value is out of range, the warm-up is as long as the schedule, or that longer than the run.

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
        total_steps: int | float | None = None,
        warmup_tokens: int | float | None = None,
        total_tokens: int | float | None = None,
    ) -> None:
        lengths = {"warmup_tokens": warmup_tokens, "total_tokens": total_tokens}
        super().__init__(
            optimizer, min_lr_ratio, warmup_steps=warmup_steps, total_steps=total_steps, **lengths
        )

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns min + (1 - min) (1 + cos(pi p)) / 2 at a share p of the way to the end."""
        return self.between((1 + math.cos(math.pi * progress(done, warmup, end))) / 2)
