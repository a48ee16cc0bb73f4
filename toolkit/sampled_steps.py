"""The base class of monitors that listen during one optimizer step in many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from core.errors import ConfigError
from core.lightning_compat import is_accumulating

__all__ = ["Handle", "SampledSteps", "in_training_forward", "unheard"]

_tried: list[None] = []  # an entry for each `unheard` that is open


class Handle(Protocol):
    """What undoes a hook, as torch's handles do."""

    def remove(self) -> None:
        """Removes the hook."""


class SampledSteps(Callback, ABC):
    """Listens to all micro-batches of every `every_n_steps`th optimizer step; in all others there are no hooks.

    Args:
        every_n_steps: Optimizer steps between two that are listened to.

    Raises:
        ConfigError: If it is below 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"{type(self).__name__} takes every_n_steps >= 1, not {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._handles: Sequence[Handle] | None = None

    @abstractmethod
    def listen(self, trainer: Trainer, pl_module: LightningModule) -> Sequence[Handle]:
        """Makes room for the figures of a step and adds the hooks that collect them."""

    @abstractmethod
    def report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the figures of the step; called on every rank."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Adds the hooks with the first micro-batch of a step that is due."""
        if (trainer.global_step + 1) % self.every_n_steps or self._handles is not None:
            return
        self._handles = self.listen(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Removes them with the last one, and reports."""
        if self._handles is not None and not is_accumulating(trainer):
            self._stop()
            self.report(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the hooks where a step breaks off."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the hooks."""
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles or ():
            handle.remove()
        self._handles = None


def in_training_forward(module: nn.Module) -> bool:
    """Returns whether a hook is called by the forward of training: not by evaluation, nor by what is computed again in backward."""
    return (
        not _tried and module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0
    )


@contextmanager
def unheard() -> Iterator[None]:
    """Context in which `in_training_forward` is False: of a forward whose values mean nothing, such as one for the shapes alone."""
    _tried.append(None)
    try:
        yield
    finally:
        _tried.pop()
