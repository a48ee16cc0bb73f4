"""Linear warm-up, then the inverse square root of the step."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule


@technique(paper="Attention Is All You Need, arXiv:1706.03762, equation 3")
class WarmupInverseSquareRoot(WarmupSchedule):
    """Raises the learning rate linearly to its peak, then lowers it as 1/sqrt(step).

    Step s, counted from 1, has sqrt(warm-up / s) times the peak, whatever the length of the run: it can go on
    for ever. In tokens the same, with the tokens seen.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the run; 0 stands for 1.
        min_lr_ratio: Least learning rate over the peak, 0 to 1.
        warmup_tokens: Tokens until the peak, in place of steps. Positions of all ranks, padding included.

    Raises:
        ConfigError: If a value is out of range or the warm-up as long as the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupInverseSquareRoot
            init_args: {warmup_steps: 100}
    """

    ends = False

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        min_lr_ratio: float = 0.0,
        warmup_tokens: int | float | None = None,
    ) -> None:
        super().__init__(optimizer, min_lr_ratio, warmup_steps=warmup_steps, warmup_tokens=warmup_tokens)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns sqrt(warmup / done), but at least `min_lr_ratio`."""
        return max(math.sqrt(warmup / done), self.min_lr_ratio)
