"""Lion: the sign of a momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from core.technique import Package, technique
from plugins.optimizers.fused_update import FusesUpdate
from plugins.optimizers.libraries import library


@technique(
    paper="Lion, arXiv:2302.06675, algorithm 2; pytorch_optimizer",
    needs=(Package("pytorch_optimizer>=4", extra="optimizers"),),
)
class Lion(FusesUpdate, library("pytorch_optimizer").Lion):  # type: ignore[misc]
    """Steps by the sign of a momentum: every weight moves by the learning rate.

    State: 4 bytes per float32 parameter. The paper uses a learning rate 3 to 10 times lower than AdamW's, and a
    weight decay as many times higher.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Weights of the old momentum in the update and in the new momentum.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: Lion
            init_args: {lr: 1.0e-4, betas: [0.9, 0.99], weight_decay: 1.0}
    """

    written = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=tuple(betas), weight_decay=weight_decay, weight_decouple=True)

    def begin(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> Sequence[float]:
        """See `FusesUpdate`."""
        self.init_group(group)
        group["step"] += 1
        rate, (beta1, beta2) = group["lr"], group["betas"]
        return 1 - rate * group["weight_decay"], 1 - beta1, 1 - beta2, rate

    @staticmethod
    def update(
        numbers: Sequence[Tensor], gradient: Tensor, parameter: Tensor, *state: Tensor
    ) -> Sequence[Tensor]:
        """See `FusesUpdate`."""
        (kept, in_update, new, rate), (momentum,) = numbers, state
        step = momentum.lerp(gradient, in_update).sign()
        return parameter * kept - rate * step, momentum.lerp(gradient, new)
