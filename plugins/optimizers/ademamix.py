"""AdEMAMix: Adam with a second, slow momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from core.technique import Package, technique
from plugins.optimizers.fused_update import FusesUpdate
from plugins.optimizers.half_precision import ChecksEps
from plugins.optimizers.libraries import library


@technique(
    paper="AdEMAMix, arXiv:2409.03137, algorithm 1 with the schedulers of appendix A.1; pytorch_optimizer",
    needs=(Package("pytorch_optimizer>=4", extra="optimizers"),),
)
class AdEMAMix(FusesUpdate, ChecksEps, library("pytorch_optimizer").AdEMAMix):  # type: ignore[misc]
    """AdamW whose update adds `alpha` times a slow momentum, an average over tens of thousands of steps.

    State: 12 bytes per float32 parameter (three moments). With `Compile`'s
    `optimizer: true` a step is one kernel for each tensor, not thirteen. `alpha` rises from 0, and the slow momentum's decay
    rate from beta1, over `alpha_beta3_steps`: without this, early training diverges. The weight decay is decoupled.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Decay rates of the fast momentum, the second moment and the slow momentum.
        alpha: Weight of the slow momentum.
        alpha_beta3_steps: Optimizer steps over which `alpha` and the slow decay rate rise; None: the length of the run, as in the paper.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: AdEMAMix
            init_args: {lr: 6.0e-4, alpha: 5.0, weight_decay: 0.1}
    """

    written = ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def __init__(
        self,
        params: Any,
        lr: float = 6e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        alpha_beta3_steps: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.fixed_steps = alpha_beta3_steps
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),
            alpha=alpha,
            t_alpha_beta3=alpha_beta3_steps,
            eps=eps,
            weight_decay=weight_decay,
            weight_decouple=True,
        )

    def bind(self, total_steps: int) -> None:
        """Sets the length of the run, unless `alpha_beta3_steps` was given."""
        for group in self.param_groups:
            group["t_alpha_beta3"] = self.fixed_steps or total_steps

    def begin(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> Sequence[float]:
        """See `FusesUpdate`."""
        self.init_group(group)
        group["step"] += 1
        step, rate, length = group["step"], group["lr"], group["t_alpha_beta3"]
        beta1, beta2, beta3 = group["betas"]
        return (
            1 - rate * group["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            1 - self.schedule_beta3(length, step, beta1, beta3),
            self.debias(beta1, step),
            math.sqrt(self.debias(beta2, step)),
            self.schedule_alpha(length, step, group["alpha"]),
            group["eps"],
            rate,
        )

    @staticmethod
    def update(
        numbers: Sequence[Tensor], gradient: Tensor, parameter: Tensor, *state: Tensor
    ) -> Sequence[Tensor]:
        """See `FusesUpdate`."""
        kept, new, beta2, new_square, new_slow, debias, debias_root, alpha, eps, rate = numbers
        fast, square, slow = state
        fast, slow = fast.lerp(gradient, new), slow.lerp(gradient, new_slow)
        square = square * beta2 + new_square * gradient * gradient
        step = (fast / debias + alpha * slow) / (square.sqrt() / debias_root + eps)
        return parameter * kept - rate * step, fast, square, slow
