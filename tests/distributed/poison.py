"""A callback that makes the gradient of one optimizer step NaN and tells whether the weights changed."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class PoisonedStep(Callback):
    """Prints `CHANGED [...]`: for each optimizer step whether it changed the weights.

    Args:
        step: The optimizer step, from 1, in which the gradient of the last norm is NaN.
    """

    def __init__(self, step: int) -> None:
        self.step, self._before, self.changed = step, torch.zeros(0), list[bool]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weight = pl_module.network.layers[0].mlp.up_proj.weight
        if not len(self._before):
            weight.register_hook(self._poison)
        self._before = weight.detach().clone()
        self._now = trainer.global_step + 1

    def _poison(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * torch.nan if self._now == self.step else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weight = pl_module.network.layers[0].mlp.up_proj.weight
        if trainer.global_step == self._now:
            self.changed.append(not torch.equal(weight, self._before))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"CHANGED {self.changed}", flush=True)
