"""The one file that names what is private in Lightning, or replaces one of its methods.

All of it was read in Lightning 2.6.6, with which each function says why there is no public way. With another release of
Lightning this is the file to read again: `tests/core/test_architecture.py` finds private names elsewhere, also overrides,
what a class inherits, and texts.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities import distributed
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.optim import Optimizer

from core.contracts import SavesBySteps

__all__ = [
    "SubprocessScriptLauncher",
    "after_closure",
    "call_as_forward",
    "collect_rng_states",
    "default_backend",
    "destroy_process_group",
    "forget_loader",
    "init_optimizers",
    "init_process_group",
    "is_accumulating",
    "is_last_batch",
    "optimizers_to_device",
    "replace_closure",
    "restore_closure",
    "set_device",
    "set_logged_steps",
    "set_rng_states",
    "steps_between_saves",
    "unwrapped",
    "validates_after_batch",
    "zero_gradients",
]

# -- ranks and processes ------------------------------------------------------------------------------------

default_backend = distributed._get_default_process_group_backend_for_device
"""Returns the backend of process groups for a device, nccl or gloo; public only as a method of each strategy."""

init_process_group = distributed._init_dist_connection
"""Connects the processes; `ParallelStrategy` of Lightning has it in its subclasses only."""

destroy_process_group = distributed._destroy_dist_connection
"""Ends the connection; Lightning registers it for the backend "nccl" alone, not for "cpu:gloo,cuda:nccl"."""

SubprocessScriptLauncher = _SubprocessScriptLauncher
"""Starts the other ranks of this machine; no launcher has a public name. A strategy offers it as its property `launcher`."""


_END_ALL = _ChildProcessObserver._terminate_all


def before_all_are_killed(say: Callable[[list[tuple[int, int]]], None]) -> None:
    """Calls `say` with the dead ranks before Lightning's launcher, which polls every 5 s, kills the others silently.

    Args:
        say: Takes (number among the processes that this one has started, from 1; exit code) of those that failed.
    """

    def end_all(observer: Any) -> None:
        codes = [process.returncode for process in observer._child_processes]
        with suppress(Exception):
            say([(number, code) for number, code in enumerate(codes, 1) if code])
        _END_ALL(observer)

    _ChildProcessObserver._terminate_all = end_all  # type: ignore[method-assign, assignment]


AcceleratorConnector = _AcceleratorConnector
"""The part of a Trainer that understands accelerator, devices, strategy and precision; a whole Trainer makes loops too."""


def set_root_dir(trainer: Trainer, folder: Path) -> None:
    """Sets `trainer.default_root_dir`, which has no setter: ranks agree on a run folder after a trainer is built."""
    setattr(trainer, "_default_root_dir", str(folder))  # noqa: B010 - mypy knows no such attribute


# -- random numbers -----------------------------------------------------------------------------------------

collect_rng_states = _collect_rng_states
"""Returns the states of all global generators: torch's, NumPy's, Python's, CUDA's; `seed_everything` only sets them."""

set_rng_states = _set_rng_states
"""Puts back what `collect_rng_states` returned."""

# -- loops: where a batch is in its step and epoch ----------------------------------------------------------


def is_accumulating(trainer: Trainer) -> bool:
    """Returns whether the optimizer does not step with the batch of now: it is not the last of its step.

    The loop alone knows, which counts batches and knows the last of an epoch.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_last_batch(trainer: Trainer) -> bool:
    """Returns whether the epoch ends with the batch of now, by `max_steps` and the like too: only the loop counts these."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def validates_after_batch(trainer: Trainer) -> bool:
    """Returns whether a validation follows the batch of now: the loop decides it after the hooks, and offers no method to ask."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    assert fetcher is not None
    return loop.epoch_loop._should_check_val_fx(fetcher)


def replace_validation_check(trainer: Trainer, due: Callable[[], bool]) -> None:
    """Lets `due()` answer behind each micro-batch whether to validate, where nothing else decides, such as a stop.

    The trainer's options count micro-batches only.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    plain = loop._should_check_val_fx

    def check(fetcher: Any) -> bool:
        usual = trainer.val_check_batch
        # Lightning asks whether it divides the batches so far.
        trainer.val_check_batch = 1 if due() else sys.maxsize
        try:
            return bool(plain(fetcher))
        finally:
            trainer.val_check_batch = usual

    loop._should_check_val_fx = check


def restore_validation_check(trainer: Trainer) -> None:
    """Undoes `replace_validation_check`."""
    vars(trainer.fit_loop.epoch_loop).pop("_should_check_val_fx", None)


def validates_by_time(trainer: Trainer) -> bool:
    """Returns whether `val_check_interval` was a time, such as "00:15:00", which Lightning keeps apart from numbers."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


LOGGED_STEPS = "_batches_that_stepped"
"""Key of that count in a checkpoint's state of the training loop, which a run that ended within an epoch has wrong."""


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Sets the count of steps that loggers are given; Lightning adds one after each batch that stepped."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def forget_loader(trainer: Trainer) -> None:
    """Lets the training loader be built when the loop begins: Lightning builds it early to count steps."""
    trainer.fit_loop._combined_loader = None


@contextmanager
def keep_loader(trainer: Trainer) -> Iterator[None]:
    """Keeps the training loader of now: what builds a schedule builds the loader too."""
    loader = trainer.fit_loop._combined_loader
    try:
        yield
    finally:
        trainer.fit_loop._combined_loader = loader


def pass_batch_by_keyword(trainer: Trainer, fixed: bool) -> None:
    """Calls `training_step(batch=..., batch_idx=...)` without inspecting its signature in each step (45 us).

    Args:
        trainer: The trainer.
        fixed: Whether the step takes both; otherwise Lightning's own way comes back.
    """
    loop = trainer.fit_loop.epoch_loop
    if fixed:
        loop._build_kwargs = _keywords  # type: ignore[method-assign, assignment]
    else:
        vars(loop).pop("_build_kwargs", None)


def _keywords(keywords: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
    keywords["batch"], keywords["batch_idx"] = batch, batch_idx
    return keywords


# -- loops: what computes a step ----------------------------------------------------------------------------


def replace_closure(trainer: Trainer, closure: Callable[[dict[str, Any]], Callable[[], Any]]) -> None:
    """Lets `closure(kwargs)` make what computes the gradients of a micro-batch under automatic optimization.

    Manual optimization is the public way, and would do without Lightning's accumulation, clipping and hooks.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    loop._make_closure = lambda kwargs, optimizer, batch_idx: closure(kwargs)


def restore_closure(trainer: Trainer) -> None:
    """Undoes `replace_closure`."""
    vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)


def zero_gradients(trainer: Trainer, batch_idx: int, optimizer: Optimizer) -> None:
    """Zeroes the gradients, through hooks, if the batch is the first of its step; part of the closure that is replaced."""
    zero = trainer.fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn(batch_idx, optimizer)
    if zero is not None:
        zero()


def after_closure(precision: Any, module: LightningModule, optimizer: Optimizer) -> None:
    """Runs `on_before_optimizer_step` and gradient clipping, between backward and the optimizer's step.

    Precisions call it inside of the step; public is only the whole step.
    """
    precision._after_closure(module, optimizer)


# -- checkpoints -------------------------------------------------------------------------------------------


def steps_between_saves(callback: Any) -> int:
    """Returns after how many optimizer steps a checkpoint callback saves; 0: it does not go by steps.

    Lightning's ModelCheckpoint has a getter for epochs alone.
    """
    if isinstance(callback, ModelCheckpoint):
        return int(callback._every_n_train_steps)
    return int(callback.every_n_steps or 0) if isinstance(callback, SavesBySteps) else 0


# -- signals ------------------------------------------------------------------------------------------------


def take_over_sigterm(trainer: Trainer) -> bool:
    """Stops Lightning from agreeing on SIGTERM in every step, which waits for the device; returns what it had seen."""
    received = trainer.received_sigterm
    trainer._signal_connector.received_sigterm = False
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return received


def end_by_sigterm(trainer: Trainer) -> None:
    """Ends the run after this batch, as Lightning does once it has received SIGTERM; `trainer.received_sigterm` only reads."""
    trainer._signal_connector.received_sigterm = True


# -- modules and optimizers ---------------------------------------------------------------------------------

NAME_OF_HOOK = "_current_fx_name"
"""Attribute of a LightningModule that Lightning sets at each hook, some 40 times a step, which has to be cheap."""

optimizers_to_device = _optimizers_to_device
"""Moves the states of optimizers to a device; Lightning does so inside of its own strategies' `setup`."""

init_optimizers = _init_optimizers_and_lr_schedulers
"""Returns the optimizers and schedules that a module configures; `setup_optimizers` wraps them at once."""


def set_device(module: LightningModule, device: torch.device) -> None:
    """Sets `module.device` without moving anything: its weights are already there, or nowhere yet."""
    module._device = device


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer in Lightning's wrapper, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def call_as_forward(strategy: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the LightningModule through the forward of the strategy's model, whose hooks act.

    The strategy's own steps do so for their method alone.
    """
    return strategy._forward_redirection(strategy.model, strategy.lightning_module, name, *args, **kwargs)
