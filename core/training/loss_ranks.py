"""Which ranks have different tokens, and what is computed over the gradients of all of them.

A strategy says it by what it offers of `core.contracts`: HasLossGroup, NormsGradients and ScalesGradients.
Without them all ranks have different tokens, and every rank has all gradients, or their DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from core.contracts import ClipsGradients, HasLossGroup, NormsGradients, ScalesGradients
from core.training.shards import gradients, local_tensors, total_norm

__all__ = ["dp_group", "dp_rank", "dp_size", "gradient_norm", "scale_gradients", "sum_over"]


class LossRanks:
    """What a trainer's strategy offers, asked once a run: `isinstance` with a Protocol takes microseconds.

    Args:
        trainer: The trainer, once the processes are connected.
    """

    def __init__(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        self.strategy = strategy
        self.group = group = dp_group(trainer)
        self.dp_rank = group.rank() if group else trainer.global_rank
        self.dp_size = group.size() if group else trainer.world_size
        self.norm = strategy.gradient_norm if isinstance(strategy, NormsGradients) else _norm
        self.clip = strategy.clip_gradients if isinstance(strategy, ClipsGradients) else None
        self.scale = strategy.scale_gradients if isinstance(strategy, ScalesGradients) else _scale

    def __reduce__(self) -> Any:
        """Copies and pickles as None: a copy of a LanguageModule has no trainer, and asks the next one."""
        return type(None), ()


def offers_of(trainer: Trainer) -> LossRanks:
    """Returns what the strategy offers, as it was asked in the `setup` of the LanguageModule."""
    module: Any = trainer.lightning_module
    known: LossRanks | None = module.loss_ranks
    return known if known is not None and known.strategy is trainer.strategy else LossRanks(trainer)


def dp_group(trainer: Trainer) -> Any:
    """Returns the process group of the ranks that have different tokens; None: all ranks."""
    strategy: Any = trainer.strategy
    return strategy.loss_group if isinstance(strategy, HasLossGroup) else None


def dp_rank(trainer: Trainer) -> int:
    """Returns this rank's number among the ranks that have different tokens."""
    return offers_of(trainer).dp_rank


def dp_size(trainer: Trainer) -> int:
    """Returns how many ranks have different tokens."""
    return offers_of(trainer).dp_size


def sum_over(trainer: Trainer, values: Tensor) -> Tensor:
    """Sums values over the ranks that have different tokens, in place."""
    ranks = offers_of(trainer)
    if ranks.dp_size == 1:
        return values
    total: Tensor = trainer.strategy.reduce(values, group=ranks.group, reduce_op="sum")
    return total


def gradient_norm(trainer: Trainer, optimizer: Any) -> Tensor:
    """Returns the 2-norm of all gradients of the model, 0-d, on the device; called on every rank."""
    norm: Tensor = offers_of(trainer).norm(optimizer)
    return norm


def scale_gradients(trainer: Trainer, optimizer: Any, factor: Tensor) -> None:
    """Multiplies all gradients of the model by a 0-d factor, in place; called on every rank."""
    offers_of(trainer).scale(optimizer, factor)


def _norm(optimizer: Any) -> Tensor:
    return total_norm(gradients(optimizer))


def _scale(optimizer: Any, factor: Tensor) -> None:
    if own := local_tensors(gradients(optimizer)):
        torch._foreach_mul_(own, factor.to(own[0].device))
