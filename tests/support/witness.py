"""A callback that writes, beside a run's own checkpoints, what a strategy gathers into a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint


class Witness(Callback):
    """Writes `whole.ckpt` after a step, and `loaded.ckpt` as soon as a checkpoint is loaded.

    Args:
        folder: Where to write.
        step: The optimizer step.
    """

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step, self._done = Path(folder), step, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path:
            self._save(trainer, "loaded.ckpt")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self._done:
            self._done = True
            self._save(trainer, "whole.ckpt")

    def _save(self, trainer: Trainer, name: str) -> None:
        strategy, own = trainer.strategy, trainer.strategy.checkpoint_io
        strategy.checkpoint_io = AtomicCheckpoint()
        trainer.save_checkpoint(self.folder / name)
        strategy.checkpoint_io = own
