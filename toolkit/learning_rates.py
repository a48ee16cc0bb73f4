"""Sets other learning rates than the configured ones, as the learning-rate finder does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from core.lightning_compat import keep_loader

__all__ = ["rebuild_at", "resume_at", "set_rates"]


def set_rates(groups: Iterable[dict[str, Any]], rate: float, main: float, written: Iterable[float]) -> None:
    """Sets the learning rates of all groups for another rate of the optimizer; other rates of groups keep their ratio.

    Args:
        groups: The settings of each group.
        rate: The optimizer's, now.
        main: The optimizer's, as written.
        written: The groups', as written.
    """
    for group, own in zip(groups, written, strict=True):
        group["lr"] = rate if own == main else own / main * rate


def rebuild_at(trainer: Any, rate: float) -> None:
    """Builds optimizer and schedule again, on every rank, as if the optimizer had been configured with this rate.

    Call it before the first optimizer step.
    """
    module = trainer.lightning_module
    configured = module.build_optimizer

    def build(groups: Any) -> Optimizer:
        optimizer: Optimizer = configured(groups)
        own = optimizer.param_groups
        set_rates(own, rate, optimizer.defaults["lr"], [group["lr"] for group in own])
        return optimizer

    module.build_optimizer = build
    with keep_loader(trainer):
        trainer.strategy.setup_optimizers(trainer)


def resume_at(trainer: Any, rate: float) -> None:
    """Makes a resumed run continue at this rate; for `on_train_start` of a callback, on every rank."""
    groups = trainer.lightning_module.written_groups
    set_rates(groups, rate, trainer.optimizers[0].defaults["lr"], [group["lr"] for group in groups])
    for config in trainer.lr_scheduler_configs:
        config.scheduler.base_lrs = [group["lr"] for group in groups]
