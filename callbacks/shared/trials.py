"""Optimizer steps that a run takes to find something out, and of which nothing is left behind."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from callbacks.shared import snapshots
from core.contracts import PackedBatches
from core.data.token_datamodule import TRAIN_ON, TokenDataModule
from core.errors import ConfigError
from core.runs.stopping import listen
from core.selection import Run

NOT_UNDONE = dict.fromkeys(
    ("DeepSpeedZero", "DeepSpeedStrategy"),
    "its trial steps put the optimizer's state back, which DeepSpeed keeps to itself: take --trainer.strategy=FSDP",
)
"""For `@technique(conflicts=...)`: strategies under which trial steps cannot be undone."""


def say(trainer: Trainer, who: object, text: str) -> None:
    """Prints what a callback has found out, or is about to, to stderr; once, not on each rank."""
    if trainer.is_global_zero:
        print(f"{type(who).__name__}: {text}", file=sys.stderr, flush=True)


def misfits(run: Run) -> Iterator[str]:
    """Yields, for a technique's `preflight`, with what of a run trial steps do not work."""
    data: Any = next((item.target for item in run.selected if item.key == "data"), TokenDataModule)
    if isinstance(data, type) and not issubclass(data, TokenDataModule):
        yield f"its trial steps go back to a position in the data, which {data.__name__} does not tell: {TRAIN_ON}"
    if run.argument("trainer.strategy.compression") == "powersgd":
        yield (
            "its trial steps cannot put back what PowerSGD left out of gradients: take --trainer.strategy.compression="
            "none for this run"
        )


@contextmanager
def trial(trainer: Trainer, hold_schedules: bool = False) -> Iterator[Iterator[Tensor]]:
    """Lends a trainer for optimizer steps on the coming batches; afterwards everything is as it was.

    For `on_train_start` and `on_train_epoch_start`. Steps go through the run's strategy, precision, accumulation and
    those callbacks that are not declared as watching; nothing is logged, saved or validated. Every rank takes part.

    Args:
        trainer: The trainer, before its first batch or between two optimizer steps.
        hold_schedules: Whether schedules have no say, so that a step's rates are those that the caller sets in the
            optimizer's groups before it.

    Yields:
        An iterator: each `next` takes one optimizer step and returns its mean loss over all label tokens, 0-d, on
        the device. It does not end.

    Raises:
        ConfigError: If the data module is none of stored tokens.
        SIGTERMException: By the iterator, on all ranks, after a step in which a signal told one of them to end.
    """
    batches = training_batches(trainer)
    module: Any = trainer.lightning_module
    clock, schedules = module._clock, trainer.lr_scheduler_configs
    with undone(trainer):
        try:
            if hold_schedules:
                module._clock, trainer.strategy.lr_scheduler_configs = None, []
            yield _steps(trainer, batches)
        finally:
            module._clock, trainer.strategy.lr_scheduler_configs = clock, schedules


def training_batches(trainer: Trainer) -> PackedBatches:
    """Returns what training batches are made of, whose own position an iteration does not change.

    Raises:
        ConfigError: If the data module is none of stored tokens.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TokenDataModule) or data._training is None:
        raise ConfigError(
            f"Trial steps go back to a position in the data, which {type(data).__name__} does not tell.\n{TRAIN_ON}."
        )
    return data._training.batches


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """Undoes what is done to the training meanwhile; nothing is logged, and callbacks that watch are not called."""
    taken, loop = snapshots.take(trainer), trainer.fit_loop.epoch_loop
    batches, random = loop.batch_progress.state_dict(), _collect_rng_states()
    callbacks, loggers, log_every = trainer.callbacks, trainer.loggers, trainer.log_every_n_steps  # type: ignore[attr-defined]
    trainer.callbacks = [each for each in callbacks if not snapshots.watches(each)]  # type: ignore[attr-defined]
    trainer.loggers, trainer.log_every_n_steps = [], sys.maxsize  # type: ignore[attr-defined]
    try:
        yield
    finally:
        snapshots.put_back(trainer, taken)
        trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
        trainer.log_every_n_steps = log_every  # type: ignore[attr-defined]
        loop.batch_progress.load_state_dict(batches)
        _set_rng_states(random)


def _steps(trainer: Trainer, batches: PackedBatches) -> Iterator[Tensor]:
    module: Any = trainer.lightning_module
    loop = trainer.fit_loop.epoch_loop
    signals = listen(module)
    # past the loader, whose position stays; training batches go on over the ends of epochs
    coming, index = iter(batches), loop.batch_progress.current.ready
    while True:
        for number in range(trainer.accumulate_grad_batches):
            _, batch = next(coming)
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
            loop.batch_progress.current.ready = number + 1  # by which Lightning knows when to step
            module.on_train_batch_start(batch, number)
            inputs = OrderedDict(batch=batch, batch_idx=index)  # from which random numbers are derived
            loop.automatic_optimization.run(trainer.optimizers[0], number, inputs)
            index += 1
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step()  # type: ignore[call-arg]
        if signals.heed(True, trainer.strategy.reduce, module.device):  # the caller waits for the loss anyway
            raise SIGTERMException
        loss: Any = module.step_loss
        yield loss.clone()
