"""Linear warm-up, then a straight line."""

from __future__ import annotations

from core.technique import technique
from plugins.schedules.warmup import WarmupSchedule, progress


@technique(paper="BERT, arXiv:1810.04805, A.2; straight to zero: arXiv:2502.15938")
class WarmupLinear(WarmupSchedule):
    """Linear warm-up, then linear decay of the learning rate to `min_lr_ratio` of its peak.

    Raises:
        ConfigError: If a value is out of range, the warm-up is as long as the schedule, or the schedule is longer
            than the run.

    Example:
        model:
          lr_scheduler:
            class_path: WarmupLinear
            init_args: {warmup_steps: 100, min_lr_ratio: 0.0}
    """

    def after_warmup(self, done: float, warmup: float, end: float) -> float:
        """Returns min + (1 - min) (1 - p) at a fraction p of the way to the end."""
        return self.between(1 - progress(done, warmup, end))
