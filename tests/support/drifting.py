"""A rank whose weights drift away from those of the others, as a wrong reduction lets them."""

import torch
from lightning.pytorch.callbacks import Callback


class Drifting(Callback):
    """Moves the weights of rank 1 a little before each step from one on.

    Args:
        first: The step.
    """

    def __init__(self, first: int) -> None:
        self.first = first

    @torch.no_grad()
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step + 1 >= self.first:
            for parameter in pl_module.network.parameters():
                parameter.add_(1e-3 * parameter.abs().mean())
