"""Adafactor: second moments factored into rows and columns."""

from __future__ import annotations

from typing import Any

import torch

from core.technique import technique
from plugins.optimizers.libraries import not_on_shards


@technique(
    paper="Adafactor, arXiv:1804.04235, algorithms 4 and 5; torch.optim.Adafactor",
    conflicts=not_on_shards("torch's Adafactor fails on sharded weights", "AdamW or Lion"),
)
class Adafactor(torch.optim.Adafactor):
    """Adam without first moments; the second moments of a matrix take one number per row and one per column.

    State: about 0.01 bytes per float32 parameter. The step is `lr` or, if that is less, 1/sqrt(step), times
    the root mean square of the weights. The weight decay is decoupled. torch's implementation reads two norms of
    each tensor on the host: every step waits for the device.

    Args:
        params: Parameters or parameter groups.
        lr: Largest step, relative to the root mean square of the weights.
        beta2_decay: The second moments' decay rate in step t is 1 - t to this power.
        d: Updates are scaled down to a root mean square of at most this.
        weight_decay: Decoupled decay per step, times the learning rate.

    Example:
        model:
          optimizer:
            class_path: Adafactor
            init_args: {lr: 0.02}
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)
