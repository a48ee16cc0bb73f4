"""Batches at certain positions of the data that break a training."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import Callback

from core.training.loss_ranks import scale_gradients
from core.training.shards import gradients, local_tensors


class Poison(Callback):
    """Spoils the batches that are read from some token positions on: whoever skips those is safe.

    Args:
        first: Position in the stream of tokens, of all ranks, from which on batches are spoilt.
        last: The position before which they are again as they were.
        gradient: What the gradients of their steps are multiplied by.
        rate: What the learning rate of their steps is multiplied by.
        garbage: Whether inputs and labels are random.
    """

    def __init__(
        self, first: int, last: int, gradient: float = 1.0, rate: float = 1.0, garbage: bool = False
    ) -> None:
        self.first, self.last, self.gradient, self.rate, self.garbage = first, last, gradient, rate, garbage

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        position = trainer.datamodule.state_dict()["position"]["cursor"]["tokens"]  # behind the batch
        self.bad = self.first < position <= self.last
        pl_module.lr_factors["Poison"] = self.rate if self.bad else 1.0
        if self.bad and self.garbage:
            random = torch.Generator().manual_seed(position)
            for name in ("input_ids", "labels"):
                batch[name].random_(0, pl_module.network.vocab_size, generator=random)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.bad or self.gradient == 1.0:
            return
        if found := local_tensors(gradients(optimizer)):
            torch._foreach_mul_(found, self.gradient)
        else:  # DeepSpeed has them, and multiplies them as it steps
            scale_gradients(trainer, optimizer, torch.tensor(self.gradient))
