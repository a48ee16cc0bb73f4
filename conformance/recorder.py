"""Notes what a run computes, exactly, and can end it as `kill -9` does."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from conformance.runs import LEFT
from conformance.waits import Waits
from core import durable


class Recorder(Callback):
    """Writes the loss of every step and all training and validation figures to `record.RANK.json`.

    In a step that is not logged it does not wait for the device.

    Args:
        folder: Where to write.
        kill_at: The optimizer step after which to send SIGKILL to this process; None: none.
        copy_at: The optimizer step after which rank 0 copies `folder` to one that is named with `LEFT` in addition: what a
            SIGKILL leaves there; None: none.
        watch: Optimizer steps in which waits for the device are counted: from the start of the step's batch to
            the start of the next, so that every callback's hooks are in it, whatever their order; a validation in
            between, and what comes after it, do not count.
        weigh: Optimizer steps after which Python's objects are counted.
        enough: The training ends where, between two neighbours of `weigh`, a step has added fewer objects; None: never.
        keep: Whether losses and inputs are kept.
    """

    def __init__(
        self,
        folder: str,
        kill_at: int | None = None,
        copy_at: int | None = None,
        watch: Sequence[int] = (),
        weigh: Sequence[int] = (),
        enough: float | None = None,
        keep: bool = True,
    ) -> None:
        self.folder, self.kill_at, self.copy_at, self.watch = Path(folder), kill_at, copy_at, list(watch)
        self.weigh, self.enough, self.keep = list(weigh), enough, keep
        self._objects: dict[str, int] = {}
        self._first = 0
        self._state: list[tuple[str, torch.Tensor, torch.Tensor]] | None = None
        self._losses: list[float | torch.Tensor] = []
        self._figures: dict[str, dict[str, float]] = {}
        self._waits = Waits()
        self._random = False
        self._inputs: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted so far: a resumed run has the complete history."""
        self._losses = [float(_whole(loss)) for loss in self._losses]
        return {"losses": list(self._losses), "figures": {**self._figures}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what was noted before the checkpoint."""
        self._losses, self._figures = list(state_dict["losses"]), {**state_dict["figures"]}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Dies if it is time, or copies what is left then; begins or ends the counting of waits."""
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._waits.stop()
        if trainer.global_step == self.copy_at and trainer.is_global_zero:
            self._copy()
        if trainer.global_step in self.weigh and str(trainer.global_step) not in self._objects:
            self._weigh(trainer)
        if trainer.global_step + 1 in self.watch:
            self._waits.start(trainer.optimizers, pl_module.device.type)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss, which stays on the device."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and self.keep:
            self._losses.append(loss.detach().clone())
        if self.keep:
            self._inputs.append(batch["input_ids"])
        if pl_module.logging_step:
            self._note(trainer, "train/")
            self._random |= _drew()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the counting of waits: a step that a validation falls into is not idle."""
        self._waits.stop()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the tensors in the state of callbacks as they are now, and as they will be."""
        if self._state is None:
            found = _tensors(checkpoint.get("callbacks", {}), "callbacks")
            self._state = [(path, tensor, tensor.detach().clone()) for path, tensor in found]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the validation figures."""
        self._note(trainer, "val/")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the record."""
        self._waits.stop()
        record = self.state_dict() | {
            "steps": trainer.global_step,
            "waits": self._waits.places,
            "random": self._random,
            "inputs": [inputs.tolist() for inputs in self._inputs],
            "objects": self._objects,
            "live": [path for path, tensor, copy in self._state or [] if not _same(tensor, copy)],
        }
        durable.write(self.folder / f"record.{trainer.global_rank}.json", json.dumps(record))

    def _copy(self) -> None:
        """Copies the folder, the first time that the step is reached."""
        target = self.folder.with_name(self.folder.name + LEFT)
        tries = 5
        while not target.exists():
            try:
                shutil.copytree(self.folder, target, symlinks=True, copy_function=_copy_if_there)
            except (shutil.Error, FileNotFoundError):
                tries -= 1  # a checkpoint that was written meanwhile got its last name
                if not tries:
                    raise
                shutil.rmtree(target, ignore_errors=True)

    def _weigh(self, trainer: Trainer) -> None:
        """Counts objects, and ends the training where there are hardly more than the last time."""
        kept, step = _kept(), trainer.global_step
        self._first = self._first or kept
        if self._objects and self.enough is not None:
            before, count = list(self._objects.items())[-1]
            if kept - self._first - count < self.enough * (step - int(before)):
                trainer.should_stop = True
        self._objects[str(step)] = kept - self._first

    def _note(self, trainer: Trainer, prefix: str) -> None:
        """Notes figures that follow from data and weights alone; others may be times."""
        metrics = trainer.callback_metrics.items()
        figures = {name: float(value) for name, value in metrics if name.startswith(prefix)}
        self._figures.setdefault(str(trainer.global_step), {}).update(figures)


class Figures(Logger):
    """Keeps what is logged: step -> name -> value.

    Args:
        folder: What it says its folder is.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.logged: dict[str, dict[str, float]] = {}

    @property
    def name(self) -> str:
        """Its name."""
        return "kit"

    @property
    def version(self) -> str:
        """There is one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return self.folder

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Leaves them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keeps the figures of a step."""
        found = {name: float(value) for name, value in metrics.items()}
        self.logged.setdefault(str(step), {}).update(found)


class Saver(Checkpoint):
    """Saves one step and the last one to checkpoints/; being a checkpoint callback, after all others' hooks.

    At the end it writes what was logged, and what else stood in `callback_metrics` in logged steps and after
    validation, to `figures.RANK.json`.

    Args:
        folder: Where to write.
        save_at: The optimizer step.
    """

    def __init__(self, folder: str, save_at: int) -> None:
        self.folder, self.save_at, self._saved = Path(folder), save_at, 0
        self._figures: dict[str, dict[str, float]] = {}
        self._seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Saves if it is time, once: further micro-batches belong to the next step."""
        if pl_module.logging_step:
            self._note(trainer)
        if trainer.global_step == self.save_at != self._saved:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the figures of callbacks that have theirs then."""
        self._note(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step, and writes the figures."""
        if trainer.global_step != self.save_at:
            self._save(trainer)
        logged = next((logger.logged for logger in trainer.loggers if isinstance(logger, Figures)), {})
        attributes = {callback.state_key: _plain(callback) for callback in trainer.callbacks}  # type: ignore[attr-defined]
        record = {"logged": logged, "metrics": self._figures, "attributes": attributes}
        durable.write(self.folder / f"figures.{trainer.global_rank}.json", json.dumps(record))

    def _note(self, trainer: Trainer) -> None:
        own = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith(("train/", "val/"))}
        new = {name: float(value) for name, value in own.items() if value is not self._seen.get(name)}
        self._seen = own
        if new:
            self._figures.setdefault(str(trainer.global_step), {}).update(new)

    def _save(self, trainer: Trainer) -> None:
        self._saved = trainer.global_step
        trainer.save_checkpoint(self.folder / "checkpoints" / f"step-{trainer.global_step}.ckpt")


def _copy_if_there(source: str, target: str) -> None:
    """Copies a file, unless a thread has renamed or deleted it since the folder was listed."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def _plain(callback: Callback) -> dict[str, Any]:
    """Returns the attributes that are single values: what a callback may have forgotten to save."""
    values = vars(callback).items()
    return {name: repr(value) for name, value in values if isinstance(value, bool | int | float)}


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested mappings and lists."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from _tensors(one, f"{path}.{key}")


def _kept() -> int:
    """Returns how many objects there are that this process has made, and elements in them."""
    gc.collect()
    found = gc.get_objects()
    return len(found) + sum(len(one) for one in found if isinstance(one, list | dict | set | deque))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _whole(loss: float | torch.Tensor) -> Any:
    """Gathers a loss that is distributed over ranks."""
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _drew() -> bool:
    """Whether random numbers were drawn since the generator was seeded, which is done for each micro-batch."""
    fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(fresh.get_state(), torch.default_generator.get_state())
