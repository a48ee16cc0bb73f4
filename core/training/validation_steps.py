"""A whole number as `trainer.val_check_interval` counts optimizer steps; Lightning alone counts micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from core import lightning_compat
from core.errors import ConfigError


def validate_in_steps(trainer: Trainer) -> None:
    """Lets a trainer validate after every `val_check_interval` optimizer steps, where that is a whole number.

    They are counted within an epoch, or, with `check_val_every_n_epoch=None`, over the run. A fraction of an epoch and a
    time stay what they are. A run that accumulates nothing validates where Lightning would.

    Args:
        trainer: The trainer, before its training starts.

    Raises:
        ConfigError: If the number is 0.
    """
    lightning_compat.restore_validation_check(trainer)  # of the fit before
    every = trainer.val_check_interval
    if isinstance(every, int) and not lightning_compat.validates_by_time(trainer):
        if every < 1:
            raise ConfigError(
                f"trainer.val_check_interval is {every}, not a number of optimizer steps from 1 upwards.\n"
                "To train without validation, set --trainer.limit_val_batches=0."
            )
        lightning_compat.replace_validation_check(trainer, partial(_due, trainer))


def check_epoch(trainer: Trainer) -> None:
    """Raises a ConfigError if an epoch, within which steps are counted, has too few of them for one validation."""
    every, accumulated = trainer.val_check_interval, trainer.accumulate_grad_batches
    batches = trainer.fit_loop.max_batches
    within = trainer.limit_val_batches and trainer.check_val_every_n_epoch is not None
    if within and isinstance(every, int) and every * accumulated > batches:
        raise ConfigError(
            f"trainer.val_check_interval is {every:,} optimizer steps; an epoch has only {batches // accumulated:,} of them "
            f"({batches:,} micro-batches, {accumulated} a step).\n"
            "Lower it, or count over the ends of epochs: --trainer.check_val_every_n_epoch=null."
        )


def _due(trainer: Trainer) -> bool:
    """Returns whether the steps up to the micro-batch of now are a multiple of the interval."""
    every: Any = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is None:
        return trainer.global_step % every == 0 and not lightning_compat.is_accumulating(trainer)
    batches = trainer.fit_loop.epoch_loop.batch_idx + 1
    return bool(batches % (every * trainer.accumulate_grad_batches) == 0)
