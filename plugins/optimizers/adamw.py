"""AdamW, the default optimizer."""

from __future__ import annotations

from typing import Any

import torch

from core.technique import technique
from core.training.shards import local_tensors
from plugins.optimizers.half_precision import ChecksEps
from toolkit.shards import is_sharded


@technique(
    paper="Decoupled Weight Decay Regularization, arXiv:1711.05101; betas and decay of GPT-3, arXiv:2005.14165, B",
    offers=("drops_updates",),
    maturity="stable",
)
class AdamW(ChecksEps, torch.optim.AdamW):
    """Adam with decoupled weight decay, as one fused kernel over all parameters.

    State: 8 bytes per float32 parameter (two moments).

    Args:
        params: Parameters or parameter groups.
        lr: Peak learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment; at least 1e-4 in 16-true.
        weight_decay: Decoupled decay per step, times the learning rate.
        fused: Whether to use one kernel for all parameters (CPU and CUDA); false: torch chooses.

    Example:
        model:
          optimizer:
            class_path: AdamW
            init_args: {lr: 6.0e-4, betas: [0.9, 0.95], weight_decay: 0.1}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused or None)
        # A fused step could unscale fp16 gradients itself, but Lightning then refuses to clip them.
        self._step_supports_amp_scaling = False

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Gives the kernel the local shards: it does not take DTensors and plain tensors in one call."""
        found = super()._init_group(group, *lists)
        if is_sharded(group["params"]):
            for tensors in lists:
                tensors[:] = local_tensors(tensors)
        return found
