"""How callbacks log: figures under the number of the optimizer step that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

__all__ = ["log_figures"]


def log_figures(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Passes figures to all loggers, and puts them into `trainer.callback_metrics`.

    The step is the optimizer step that is being made, or, between two, the one that was made last. Micro-batches and
    `batch_idx` have no part in it. For steps in which `pl_module.logging_step` is true, and after validation: a figure
    that is a tensor makes the host wait for the device. Not `pl_module.log`, which Lightning goes through again after
    every step.

    Args:
        trainer: The trainer.
        figures: Name -> value, of all ranks: a sum over ranks is ``trainer.strategy.reduce(value, reduce_op="sum")``,
            which every rank calls. Names have a prefix of the technique's own, such as "spike_guard/skipped".
    """
    module: Any = trainer.lightning_module
    step = trainer.global_step + bool(module.stepping)
    values = {name: float(value) for name, value in figures.items()}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
    for name, value in values.items():
        trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)
