"""Notes what a run computes, exactly, and can end it as `kill -9` does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from core.files import durable
from core.testing.waits import Waits


class Recorder(Callback):
    """Writes the loss of every step and all training and validation figures to `record.RANK.json`.

    In a step that is not logged it does not wait for the device.

    Args:
        folder: Where to write.
        kill_at: The optimizer step after which to send SIGKILL to this process; None: none.
        watch: Optimizer steps in which waits for the device are counted: from the start of the step's batch to
            the start of the next, so that every callback's hooks are in it, whatever their order.
    """

    def __init__(self, folder: str, kill_at: int | None = None, watch: Sequence[int] = ()) -> None:
        self.folder, self.kill_at, self.watch = Path(folder), kill_at, list(watch)
        self._losses: list[float | torch.Tensor] = []
        self._figures: dict[str, dict[str, float]] = {}
        self._waits = Waits()
        self._random = False
        self._inputs: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted so far: a resumed run has the whole history."""
        self._losses = [float(_whole(loss)) for loss in self._losses]
        return {"losses": list(self._losses), "figures": {**self._figures}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self._losses, self._figures = list(state_dict["losses"]), {**state_dict["figures"]}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Dies if it is time; begins or ends the counting of waits."""
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._waits.stop()
        if trainer.global_step + 1 in self.watch:
            self._waits.start(trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss, which stays on the device."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().clone())
        self._inputs.append(batch["input_ids"])
        if pl_module.logging_step:
            self._note(trainer, "train/")
            self._random |= _drew()

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
        }
        durable.write(self.folder / f"record.{trainer.global_rank}.json", json.dumps(record))

    def _note(self, trainer: Trainer, prefix: str) -> None:
        """Notes figures that follow from data and weights alone; others may be times."""
        metrics = trainer.callback_metrics.items()
        figures = {name: float(value) for name, value in metrics if name.startswith(prefix)}
        self._figures.setdefault(str(trainer.global_step), {}).update(figures)


class Saver(Checkpoint):
    """Saves one step and the last one to checkpoints/; being a checkpoint callback, after all others' hooks.

    Args:
        folder: Where to write.
        save_at: The optimizer step.
    """

    def __init__(self, folder: str, save_at: int) -> None:
        self.folder, self.save_at, self._saved = Path(folder), save_at, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Saves if it is time, once: further micro-batches belong to the next step."""
        if trainer.global_step == self.save_at != self._saved:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step."""
        if trainer.global_step != self.save_at:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._saved = trainer.global_step
        trainer.save_checkpoint(self.folder / "checkpoints" / f"step-{trainer.global_step}.ckpt")


def _whole(loss: float | torch.Tensor) -> Any:
    """Gathers a loss that is spread over ranks."""
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _drew() -> bool:
    """Whether random numbers were drawn since the generator was seeded, which is done for each micro-batch."""
    fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    return not torch.equal(fresh.get_state(), torch.default_generator.get_state())
