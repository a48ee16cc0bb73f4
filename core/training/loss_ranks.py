"""What `LanguageModule` asks a strategy: which ranks have different tokens, and what spread gradients add up to.

A strategy under which several ranks work on the same tokens offers `loss_group`, the process group of those that
have different ones: losses are summed over it, gradients averaged over it. One that spreads gradients offers
`gradient_norm(optimizer)` and `clip_gradients(optimizer, limit, algorithm)`, one that does not show them
`scale_gradients(optimizer, factor)` as well. One that gathers weights for the forward of the whole module offers
`run_as_forward(name, *args)`, which calls a method of the module as that. Without them all ranks have different tokens and every rank has whole
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from core.contracts import TokenSum
from core.training.shards import gradients, local, total_norm


def group_of(trainer: Trainer) -> Any:
    """Returns the process group of the ranks that have different tokens; None: all ranks."""
    return getattr(trainer.strategy, "loss_group", None)


def place_of(trainer: Trainer) -> tuple[int, int]:
    """Returns this rank's place among the ranks that have different tokens, and their number."""
    if (group := group_of(trainer)) is not None:
        return group.rank(), group.size()
    return trainer.global_rank, trainer.world_size


def sum_over(trainer: Trainer, values: Tensor) -> Tensor:
    """Sums values over the ranks that have different tokens, in place."""
    if place_of(trainer)[1] == 1:
        return values
    total: Tensor = trainer.strategy.reduce(values, group=group_of(trainer), reduce_op="sum")
    return total


def loss_of(trainer: Trainer, module: Any, batch: Mapping[str, Tensor]) -> TokenSum:
    """Returns the loss of a batch, for a callback: where no step of Lightning's runs."""
    run = getattr(trainer.strategy, "run_as_forward", None)
    loss: TokenSum = (run("compute_loss", batch) if run else module.compute_loss(batch))[0]
    return loss


def gradient_norm(trainer: Trainer, optimizer: Any) -> Tensor:
    """Returns the norm of all gradients of the model, a 0-d tensor."""
    if (norm_of := getattr(trainer.strategy, "gradient_norm", None)) is not None:
        norm: Tensor = norm_of(optimizer)
        return norm
    return total_norm(gradients(optimizer))


def scale_gradients(trainer: Trainer, optimizer: Any, factor: Tensor) -> None:
    """Multiplies all gradients by a 0-d factor."""
    if (scale := getattr(trainer.strategy, "scale_gradients", None)) is not None:
        scale(optimizer, factor)
    elif own := local(gradients(optimizer)):
        torch._foreach_mul_(own, factor.to(own[0].device))
