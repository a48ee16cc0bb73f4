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
    watches=True,
)
class PeriodicCheckpoint(Checkpoint):
    """Keeps the newest checkpoints of a run, and always one of its last step.

    Files are named `step-00000100.ckpt`. Two are kept by default, so that there is one to go back to
    should the disk damage the newest. Of a checkpoint that is written in the background, `checkpoint/stall_s` is
    logged: the seconds for which it held training up.

    Args:
        every_n_steps: Optimizer steps between checkpoints.
        keep: How many of the newest to keep; -1 keeps all.
        dirpath: The folder to write to.
        keep_every_n_steps: Checkpoints of multiples of so many steps are kept besides, for good.
        keep_best: Whether the one with the lowest `val/loss` is kept besides; one is saved after each validation
            that found a lower loss, but for one between the micro-batches of a step.

    Attributes:
        last_model_path: The newest checkpoint that this process wrote; empty before the first.
        best_model_path: The one with the lowest `val/loss` so far; empty without `keep_best`.

    Raises:
        ConfigError: If `every_n_steps` or `keep_every_n_steps` < 1, or `keep` is neither -1 nor at least 1.

    Example:
        trainer:
          callbacks+:
            - class_path: PeriodicCheckpoint
              init_args: {every_n_steps: 500, keep: 2}
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        keep: int = 2,
        dirpath: str = "${run_folder}/checkpoints",
        keep_every_n_steps: int | None = None,
        keep_best: bool = False,
    ) -> None:
        if every_n_steps < 1 or (keep < 1 and keep != -1):
            raise ConfigError(
                "PeriodicCheckpoint takes every_n_steps >= 1 and keep >= 1 (or -1 for all), "
                f"not {every_n_steps} and {keep}."
            )
        if keep_every_n_steps is not None and (keep_every_n_steps < 1 or keep_every_n_steps % every_n_steps):
            raise ConfigError(
                f"PeriodicCheckpoint: keep_every_n_steps is {keep_every_n_steps}; it takes a multiple of "
                f"every_n_steps ({every_n_steps}): no others are saved."
            )
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.dirpath = dirpath
        self.keep_every_n_steps, self.keep_best = keep_every_n_steps, keep_best
        self.last_model_path = self.best_model_path = ""
        self._best = float("inf")
        self._io: Any = None
        self._saved_step = 0
        self._due = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the folder from rank 0, which alone knows the run's."""
        self.dirpath = trainer.strategy.broadcast(self.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run need not save again where it starts."""
        self._io = trainer.strategy.checkpoint_io
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when a multiple of `every_n_steps` is complete; a step with a validation waits for it."""
        step = trainer.global_step
        if step < self._saved_step:
            self._go_back(step)
        self._due = step % self.every_n_steps == 0 and step not in (self._saved_step, trainer.max_steps)
        loop = trainer.fit_loop
        if self._due and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._save(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what waited: a resumed run would not repeat the validation."""
        if trainer.sanity_checking:
            return
        # Not between the micro-batches of a step, whose gradients so far would not be saved.
        if self.keep_best and not trainer.fit_loop.epoch_loop._should_accumulate():
            loss, path = float(trainer.callback_metrics["val/loss"]), self.path_of(trainer.global_step)
            if loss < self._best:
                self._best, self.best_model_path, self._due = loss, str(path), True
        if self._due and trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the step after which a signal ended the run."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step, and waits until it is on the disk."""
        if trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)
        if hasattr(self._io, "wait"):
            self._io.wait()
            self._prune(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns which checkpoint was the best so far."""
        return {"best": self._best, "path": self.best_model_path} if self.best_model_path else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self._best, self.best_model_path = state_dict["best"], state_dict["path"]

    def _go_back(self, step: int) -> None:
        """Training has gone back to a step: those saved behind it come again, and overwrite what was saved."""
        self._saved_step = 0
        if self.best_model_path and _step_of(Path(self.best_model_path)) > step:
            self._best, self.best_model_path = float("inf"), ""

    def _save(self, trainer: Trainer, step: int) -> None:
        self._due = False
        path = self.path_of(step)
        trainer.save_checkpoint(path)
        self._saved_step, self.last_model_path = step, str(path)
        if hasattr(self._io, "stall_s"):
            for logger in trainer.loggers:
                logger.log_metrics({"checkpoint/stall_s": self._io.stall_s}, step=step)
        self._prune(trainer)

    def path_of(self, step: int) -> Path:
        """Returns where the checkpoint of a step lies, or would."""
        return Path(self.dirpath, f"step-{step:08d}.ckpt")

    def _prune(self, trainer: Trainer) -> None:
        """Removes what need not be kept; one that is still being written is not seen here, and one more is kept."""
        if not trainer.is_global_zero or self.keep < 0:
            return
        for old in _by_age(Path(self.dirpath))[: -self.keep]:
            step = _step_of(old)
            for_good = self.keep_every_n_steps and step % self.keep_every_n_steps == 0
            if not for_good and old.name != Path(self.best_model_path).name:
                trainer.strategy.remove_checkpoint(old)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
