"""Trial steps: optimizer steps that measure something, after which the state of training is restored."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from core.contracts import Batch, PackedBatches
from core.data.token_datamodule import TRAIN_ON, TokenDataModule
from core.errors import ConfigError, deprecated
from core.lightning_compat import collect_rng_states, set_rng_states
from core.training.stopping import listen
from toolkit import snapshots
from toolkit.selection import Run

NOT_RESTORABLE = {
    "DeepSpeedStrategy": "it restores weights and states of the optimizer, which Lightning's own does not show: take "
    "--trainer.strategy=DeepSpeedZero"
}
"""For `@technique(conflicts=...)`: strategies under which the state of training cannot be restored."""


def offloaded(run: Run) -> Iterator[str]:
    """Yields, for a technique's `preflight`, what `DeepSpeedZero` keeps where snapshots do not see it."""
    for name in ("offload_optimizer", "offload_parameters"):
        if run.argument(f"trainer.strategy.{name}") == "nvme":
            yield f"it copies the optimizer's state, which {name} nvme keeps on disk: set --trainer.strategy.{name}=cpu"
    strategies = [item.name for item in run.selected if item.kind == "strategies"]
    if "DeepSpeedZero" in strategies and str(run.argument("trainer.precision")) in ("16", "16-mixed"):
        yield "it cannot restore DeepSpeed's loss scale: set --trainer.precision=bf16-mixed"


def say(trainer: Trainer, who: object, text: str) -> None:
    """Prints a message of a callback to stderr, on rank 0 only."""
    if trainer.is_global_zero:
        print(f"{type(who).__name__}: {text}", file=sys.stderr, flush=True)


def compatibility_errors(run: Run) -> Iterator[str]:
    """Yields, for a technique's `preflight`, what a run has that trial steps do not support."""
    data: Any = next((item.target for item in run.selected if item.key == "data"), TokenDataModule)
    if isinstance(data, type) and not issubclass(data, TokenDataModule):
        yield f"its trial steps go back to a position in the data, which {data.__name__} does not record: {TRAIN_ON}"
    if run.argument("trainer.strategy.compression") == "powersgd":
        yield (
            "its trial steps cannot restore the error that PowerSGD keeps: take --trainer.strategy.compression="
            "none for this run"
        )
    yield from offloaded(run)


@contextmanager
def trial(
    trainer: Trainer, hold_schedules: bool = False, batches: Iterable[Batch] | None = None
) -> Iterator[Iterator[Tensor]]:
    """Takes optimizer steps on the coming batches, and restores everything afterwards.

    For `on_train_start` and `on_train_epoch_start`. Steps use the run's strategy, precision and accumulation, and
    callbacks that are not observers; nothing is logged, saved or validated. Called on every rank.

    Args:
        trainer: The trainer, before its first batch or between two optimizer steps.
        hold_schedules: Whether schedules are off, so that the caller sets the learning rates in the optimizer's groups
            before each step.
        batches: Micro-batches of this rank to take steps on, in place of the coming ones.

    Yields:
        An iterator: each `next` takes one optimizer step and returns its mean loss over all label tokens, 0-d, on
        the device. It does not end, except with `batches`.

    Raises:
        ConfigError: If the data module is no TokenDataModule.
        SIGTERMException: By the iterator, on all ranks, after a step in which one of them received a signal to end.
    """
    # not from the loader, whose position must stay; training batches continue over the ends of epochs
    coming = iter(batches) if batches is not None else (batch for _, batch in training_batches(trainer))
    module: Any = trainer.lightning_module
    clock, schedules = module.schedule_clock, trainer.lr_scheduler_configs
    with restored_after(trainer):
        try:
            if hold_schedules:
                module.schedule_clock, trainer.strategy.lr_scheduler_configs = None, []
            yield _steps(trainer, coming)
        finally:
            module.schedule_clock, trainer.strategy.lr_scheduler_configs = clock, schedules


def training_batches(trainer: Trainer) -> PackedBatches:
    """Returns the training batches; iterating over them does not change their own position.

    Raises:
        ConfigError: If the data module is no TokenDataModule.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TokenDataModule) or data.training_loader is None:
        raise ConfigError(
            f"Trial steps go back to a position in the data, which {type(data).__name__} does not record.\n{TRAIN_ON}."
        )
    return data.training_loader.batches


@contextmanager
def restored_after(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Restores training at the end; meanwhile nothing is logged, and observers are not called.

    Yields:
        What restores weights, the optimizer and all else that a snapshot has before the end, too; for every rank to call.
    """
    taken, loop = snapshots.take_snapshot(trainer), trainer.fit_loop.epoch_loop
    batches, random = loop.batch_progress.state_dict(), collect_rng_states()
    callbacks, loggers, log_every = trainer.callbacks, trainer.loggers, trainer.log_every_n_steps  # type: ignore[attr-defined]
    trainer.callbacks = [each for each in callbacks if not snapshots.is_observer(each)]  # type: ignore[attr-defined]
    trainer.loggers, trainer.log_every_n_steps = [], sys.maxsize  # type: ignore[attr-defined]
    try:
        yield lambda: snapshots.put_back(trainer, taken)
    finally:
        snapshots.put_back(trainer, taken)
        trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
        trainer.log_every_n_steps = log_every  # type: ignore[attr-defined]
        loop.batch_progress.load_state_dict(batches)
        set_rng_states(random)


def _steps(trainer: Trainer, coming: Iterator[Batch]) -> Iterator[Tensor]:
    module: Any = trainer.lightning_module
    loop = trainer.fit_loop.epoch_loop
    signals = listen(module)
    index = loop.batch_progress.current.ready
    while True:
        for number in range(trainer.accumulate_grad_batches):
            batch = next(coming, None)
            if batch is None:
                return
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
            loop.batch_progress.current.ready = number + 1  # by which Lightning knows when to step
            module.on_train_batch_start(batch, number)
            inputs = OrderedDict(batch=batch, batch_idx=index)  # from which random numbers are derived
            loop.automatic_optimization.run(trainer.optimizers[0], number, inputs)
            index += 1
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step()  # type: ignore[call-arg]
        if signals.poll(True, trainer.strategy.reduce, module.device):  # the caller waits for the loss anyway
            raise SIGTERMException
        loss: Any = module.step_loss
        yield loss.clone()


def __getattr__(name: str) -> Any:
    if name == "NOT_UNDONE":
        deprecated("toolkit.trials.NOT_UNDONE", "NOT_RESTORABLE")
        return NOT_RESTORABLE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
