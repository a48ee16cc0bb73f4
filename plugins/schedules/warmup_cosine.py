"""Linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from core.contracts import Schedule
from core.errors import ConfigError
from core.technique import technique

if TYPE_CHECKING:
    from core.selection import Run, Selected


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> float:
    """Returns the factor on the peak learning rate for optimizer step `step`, counted from 0.

    Step 0 has 1/warmup_steps, step warmup_steps - 1 has 1, step total_steps - 1 has min_lr_ratio;
    later steps stay there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    first = max(warmup_steps - 1, 0)
    progress = min((step - first) / max(total_steps - 1 - first, 1), 1.0)
    return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def _too_long(warmup_steps: int, total_steps: int) -> str:
    return (
        f"warmup_steps is {warmup_steps}, the schedule only {total_steps} steps long.\n"
        f"Set --model.lr_scheduler.warmup_steps to less than {total_steps}, or train for longer."
    )


def _never_ends(total_steps: int, run_steps: int) -> str:
    return (
        f"total_steps is {total_steps}, the run only {run_steps} steps long: it would end before the schedule.\n"
        f"Set --model.lr_scheduler.total_steps to {run_steps} or less, or leave it out to take the run's length."
    )


@technique(
    paper="SGDR, arXiv:1608.03983, one cycle; to a tenth of the peak as in GPT-3, arXiv:2005.14165, B",
    maturity="stable",
)
class WarmupCosine(Schedule):
    """Raises the learning rate linearly, then lowers it along half a cosine to `min_lr_ratio` of its peak.

    The last optimizer step of the run has exactly `min_lr_ratio` times the peak.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_steps: Optimizer steps until the peak; 0 starts there.
        min_lr_ratio: Final learning rate over the peak, 0 to 1.
        total_steps: Optimizer steps of the whole schedule, after which the rate stays at its end; None: the
            length of the run.

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
        warmup_steps: int = 100,
        min_lr_ratio: float = 0.1,
        total_steps: int | None = None,
    ) -> None:
        if warmup_steps < 0 or not 0 <= min_lr_ratio <= 1 or (total_steps is not None and total_steps < 1):
            raise ConfigError(
                "WarmupCosine takes warmup_steps >= 0, min_lr_ratio from 0 to 1 and total_steps >= 1 (or none), "
                f"not {warmup_steps}, {min_lr_ratio} and {total_steps}."
            )
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.fixed_steps = total_steps
        self.total_steps = total_steps or warmup_steps + 1
        super().__init__(optimizer)

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what is too long, the warm-up or the schedule, where `trainer.max_steps` tells."""
        if run.argument("trainer.fast_dev_run"):
            return
        warmup, fixed = (own.arguments.get(name) or 0 for name in ("warmup_steps", "total_steps"))
        run_steps = run.argument("trainer.max_steps") or 0
        if fixed > run_steps > 1:
            yield _never_ends(fixed, run_steps)
        if warmup >= (steps := fixed or run_steps) > 1:
            yield _too_long(warmup, steps)

    def bind(self, total_steps: int) -> None:
        """Takes the length of the run, unless one was given."""
        if (self.fixed_steps or 0) > total_steps > 1:
            raise ConfigError(f"WarmupCosine: {_never_ends(self.fixed_steps or 0, total_steps)}")
        total_steps = self.fixed_steps or total_steps
        if self.warmup_steps >= total_steps > 1:
            raise ConfigError(f"WarmupCosine: {_too_long(self.warmup_steps, total_steps)}")
        super().bind(total_steps)

    def get_lr(self) -> list[float]:
        """Returns the rate of the current step for each parameter group."""
        factor = warmup_cosine(self.last_epoch, self.warmup_steps, self.total_steps, self.min_lr_ratio)
        return [peak * factor for peak in self.base_lrs]
