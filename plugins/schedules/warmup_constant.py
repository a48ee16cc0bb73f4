"""Linear warm-up, then a constant learning rate."""

from __future__ import annotations

from torch.optim import Optimizer

from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule


@technique(paper="Goyal et al., arXiv:1706.02677, section 2.2 (gradual warm-up)")
class WarmupConstant(WarmupSchedule):
    """Linear warm-up, then a constant learning rate.

    Args:
        warmup_steps: Optimizer steps until the peak; below 1 a fraction of the run; 0 starts at the peak.
        warmup_tokens: Tokens until the peak, in place of steps. All positions on all ranks count, with padding.

    Raises:
        ConfigError: If the warm-up is below 0 or as long as the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupConstant
            init_args: {warmup_steps: 100}
    """

    ends = False

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float = 100,
        warmup_tokens: int | float | None = None,
    ) -> None:
        super().__init__(optimizer, warmup_steps, 1.0, warmup_tokens=warmup_tokens)

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns 1."""
        return 1.0
