"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch

from core.technique import technique
from toolkit.shards import is_sharded


@technique(
    paper="Sutskever et al., ICML 2013, section 2 (momentum, Nesterov's too); torch.optim.SGD",
    offers=("drops_updates",),
)
class SGD(torch.optim.SGD):
    """Gradient descent with momentum, as one fused kernel over all parameters.

    State: 4 bytes per float32 parameter (momentum). `weight_decay` is L2 regularisation: it is added to the
    gradient and passes through the momentum.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        momentum: Weight of the previous update in the next one.
        weight_decay: Coefficient c of c/2 times the sum of squares of the weights.
        nesterov: Whether to use Nesterov momentum.
        fused: Whether to use one kernel for all parameters (CPU and CUDA); false: torch chooses.

    Example:
        model:
          optimizer:
            class_path: SGD
            init_args: {lr: 0.5, momentum: 0.9}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=fused or None,
        )
        # As in AdamW: Lightning refuses to clip gradients unless it unscales them before the step.
        self._step_supports_amp_scaling = False

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Steps sharded weights without the fused kernel, which does not take DTensors; with foreach if of one mesh."""
        if is_sharded(group["params"]):
            meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
            group["fused"], group["foreach"] = False, len(meshes) == 1
        return super()._init_group(group, *lists)
