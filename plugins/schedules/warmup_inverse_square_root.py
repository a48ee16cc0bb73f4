"""Linear warm-up, then the inverse square root of the step."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule


@technique(paper="Attention Is All You Need, arXiv:1706.03762, equation 3")
class WarmupInverseSquareRoot(WarmupSchedule):
    """Linear warm-up, then decay of the learning rate as 1/sqrt(step).

    Step s, counted from 1, has sqrt(warm-up / s) times the peak, whatever the length of the run: training can
    continue without an end. With `warmup_tokens`, s counts tokens.

    Args:
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the run; 0 means 1.
        min_lr_ratio: Lowest learning rate over the peak, 0 to 1.
        warmup_tokens: Tokens until the peak, in place of steps. All positions on all ranks count, with padding.

    Raises:
        ConfigError: If a value is out of range or the warm-up is as long as the run.

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
        super().__init__(optimizer, warmup_steps, min_lr_ratio, warmup_tokens=warmup_tokens)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns sqrt(warmup / done), but at least `min_lr_ratio`."""
        return max(math.sqrt(warmup / done), self.min_lr_ratio)
