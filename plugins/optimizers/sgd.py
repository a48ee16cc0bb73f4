"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch

from core.technique import technique
from core.training.shards import is_spread


@technique(
    paper="Sutskever et al., ICML 2013, section 2 (momentum, Nesterov's too); torch.optim.SGD",
    offers=("drops_updates",),
)
class SGD(torch.optim.SGD):
    """Gradient descent with momentum, as one fused kernel over all parameters.

    State: 4 bytes per float32 parameter (momentum). `weight_decay` is that of the objective (L2): it is
    added to the gradient and passes through the momentum.

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        momentum: How much of the last update is kept.
        weight_decay: Coefficient c of c/2 times the sum of squares of the weights.
        nesterov: Whether the gradient is taken ahead of the momentum.
        fused: One kernel for all parameters (CPU and CUDA); false: torch's own choice.

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
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, **options, fused=fused or None)
        # As in AdamW: Lightning unscales fp16 gradients before, or it refuses to clip.
        self._step_supports_amp_scaling = False

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Steps spread weights without the fused kernel, which does not take them; together if of one mesh."""
        if is_spread(group["params"]):
            meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
            group["fused"], group["foreach"] = False, len(meshes) == 1
        return super()._init_group(group, *lists)
