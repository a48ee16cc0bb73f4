"""Saves the run every n optimizer steps, at its end, and where a signal ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from core.errors import ConfigError
from core.technique import technique


@technique(
    paper="own work: what ModelCheckpoint does with monitor='step', and a save of the last step",
    maturity="stable",
)
class PeriodicCheckpoint(Checkpoint):
    """Keeps the newest checkpoints of a run, and always one of its last step.

    Files are named `step-00000100.ckpt`. Two are kept by default, so that there is one to go back to
    should the disk damage the newest.

    Args:
        every_n_steps: Optimizer steps between checkpoints.
        keep: How many of the newest to keep; -1 keeps all.
        dirpath: The folder to write to.

    Attributes:
        last_model_path: The newest checkpoint that this process wrote; empty before the first.

    Raises:
        ConfigError: If `every_n_steps` < 1, or `keep` is neither -1 nor at least 1.

    Example:
        trainer:
          callbacks+:
            - class_path: PeriodicCheckpoint
              init_args: {every_n_steps: 500, keep: 2}
    """

    def __init__(
        self, every_n_steps: int = 500, keep: int = 2, dirpath: str = "${run_folder}/checkpoints"
    ) -> None:
        if every_n_steps < 1 or (keep < 1 and keep != -1):
            raise ConfigError(
                "PeriodicCheckpoint takes every_n_steps >= 1 and keep >= 1 (or -1 for all), "
                f"not {every_n_steps} and {keep}."
            )
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.dirpath = dirpath
        self.last_model_path = ""
        self._saved_step = 0
        self._due = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the folder from rank 0, which alone knows the run's."""
        self.dirpath = trainer.strategy.broadcast(self.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run need not save again where it starts."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when a multiple of `every_n_steps` is complete; a step with a validation waits for it."""
        step = trainer.global_step
        self._due = step % self.every_n_steps == 0 and step not in (self._saved_step, trainer.max_steps)
        loop = trainer.fit_loop
        if self._due and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._save(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what waited: a resumed run would not repeat the validation."""
        if self._due and not trainer.sanity_checking:
            self._save(trainer, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the step after which a signal ended the run."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step."""
        if trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)

    def _save(self, trainer: Trainer, step: int) -> None:
        self._due = False
        path = Path(self.dirpath, f"step-{step:08d}.ckpt")
        trainer.save_checkpoint(path)
        self._saved_step, self.last_model_path = step, str(path)
        if trainer.is_global_zero and self.keep > 0:
            for old in _by_age(path.parent)[: -self.keep]:
                trainer.strategy.remove_checkpoint(old)


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
