"""Saves the run every n optimizer steps, at its end, and where a signal ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from core.contracts import MeasuresStall, WaitsForDisk
from core.errors import ConfigError
from core.lightning_compat import is_accumulating, validates_after_batch
from core.technique import technique
from toolkit.checkpoint_names import ABANDONED, step_named
from toolkit.checkpoint_places import Place, StagesUploads, place_of, require_uploads
from toolkit.local_paths import is_url


@technique(
    paper="own work: like ModelCheckpoint with monitor='step', and a save of the last step",
    offers=("writes_to_urls",),
    maturity="stable",
    observer=True,
)
class PeriodicCheckpoint(Checkpoint):
    """Keeps the newest checkpoints of a run, and always one of its last step.

    Files are named `step-00000100.ckpt`. Two are kept by default, so that there is another one if the newest is
    damaged. Only what this run has written is ever removed. Where a run goes back to an earlier step, later checkpoints
    are renamed to `step-00000200.abandoned.ckpt`. Where the checkpoint format measures it, `checkpoint/stall_s` is
    logged: the seconds for which the checkpoint interrupted training.

    With a URL as `dirpath` checkpoints are written into `uploads/` of the run folder, and uploaded while training
    continues; one that is uploaded is deleted there.

    Args:
        every_n_steps: Optimizer steps between checkpoints.
        keep: How many of the newest to keep; -1 keeps all.
        dirpath: The folder to write to, on this machine or on object storage, such as `s3://bucket/runs/first`.
        keep_every_n_steps: Checkpoints at multiples of this many steps are also kept, and never removed.
        keep_best: Whether the one with the lowest `val/loss` is also kept. One is saved after each validation that
            found a lower loss, unless that validation was between the micro-batches of a step.

    Attributes:
        last_model_path: The newest checkpoint that this process wrote; empty before the first.
        best_model_path: The one with the lowest `val/loss` so far; empty without `keep_best`.

    Raises:
        ConfigError: If `every_n_steps` or `keep_every_n_steps` < 1, or `keep` is neither -1 nor at least 1;
            if nothing can be written to `dirpath`, or that URL belongs to another run.

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
        self._place: Place = place_of(dirpath)
        self.keep_every_n_steps, self.keep_best = keep_every_n_steps, keep_best
        self.last_model_path = self.best_model_path = self._owner = ""
        self._best = float("inf")
        self._io: Any = None
        self._saved_step = 0
        self._due = False
        self._written: list[str] = []
        self._restored: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the folder from rank 0, which alone knows the run folder."""
        self.dirpath = trainer.strategy.broadcast(self.dirpath)
        self._place = place_of(self.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does not save again the step that a resumed run starts from."""
        self._io = trainer.strategy.checkpoint_io
        self._saved_step = trainer.global_step
        if is_url(self.dirpath):
            require_uploads(self._io, self.dirpath).stage_in(Path(trainer.default_root_dir, "uploads"))
        self._raise_on_all(trainer, self._fault(trainer))  # the others would wait for the first
        self._owner = trainer.strategy.broadcast(self._owner)

    def _fault(self, trainer: Trainer) -> ConfigError | None:
        """Prepares the place on the first rank; returns why nothing can be written there."""
        try:
            if trainer.is_global_zero:
                folder = Path(trainer.default_root_dir)
                self._owner = self._place.check(bool(trainer.ckpt_path), folder, self._owner)
                if trainer.ckpt_path:
                    self._set_aside(trainer, trainer.global_step)
        except (ConfigError, OSError) as error:
            return ConfigError(str(error))
        return None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when a multiple of `every_n_steps` is complete; a step with a validation waits for it."""
        step = trainer.global_step
        if step < self._saved_step:
            self._go_back(trainer, step)
        self._due = step % self.every_n_steps == 0 and step not in (self._saved_step, trainer.max_steps)
        if self._due and not validates_after_batch(trainer):
            self._save(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the step that waited: a resumed run would not repeat the validation."""
        if trainer.sanity_checking:
            return
        # Not between the micro-batches of a step, whose gradients so far would not be saved.
        if self.keep_best and not is_accumulating(trainer):
            loss, path = float(trainer.callback_metrics["val/loss"]), self.path_of(trainer.global_step)
            if loss < self._best:
                self._best, self.best_model_path, self._due = loss, str(path), True
        if self._due and trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the step after which a signal ended the run."""
        if isinstance(self._io, StagesUploads):
            self._io.end_soon()
        if isinstance(exception, SIGTERMException):
            faults = list(map(str, exception.args))
            try:
                self.on_train_end(trainer, pl_module)
            except (ConfigError, SIGTERMException) as error:
                if not is_url(self.dirpath):
                    raise
                faults.append(str(error))  # the step is on this machine: the run ends by its signal
            for fault in dict.fromkeys(faults) if trainer.is_global_zero else ():
                print(fault, file=sys.stderr, flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step, and waits until it is on the disk."""
        if trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)
        if isinstance(self._io, WaitsForDisk):
            self._settle(trainer)
            self._prune(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this run has written and keeps, and which checkpoint was the best so far."""
        best = {"best": self._best, "path": self.best_model_path} if self.best_model_path else {}
        owner = {"owner": self._owner} if self._owner else {}
        return {"written": list(self._written), **best, **owner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there; the folder may be another one now."""
        names = [str(name) for name in state_dict.get("written", ())]
        self._written = [name for name in names if "/" not in name and step_named(Path(name)) is not None]
        self._restored, self._owner = set(self._written), str(state_dict.get("owner", ""))
        if state_dict.get("path"):
            self._best = float(state_dict["best"])
            self.best_model_path = str(self._place.path_of(Path(state_dict["path"]).name))

    def _go_back(self, trainer: Trainer, step: int) -> None:
        """Training has gone back to a step: later steps will be saved again."""
        self._saved_step = 0
        self._settle(trainer)
        fault = _attempt(lambda: self._set_aside(trainer, step)) if trainer.is_global_zero else None
        self._raise_on_all(trainer, fault)
        if self.best_model_path and (step_named(Path(self.best_model_path)) or 0) > step:
            self._best, self.best_model_path = float("inf"), ""

    def _set_aside(self, trainer: Trainer, step: int) -> None:
        """Renames the checkpoints after a step that the run continues from: they belong to a discarded history."""
        for old, name in self._place.set_aside(step, lambda: self._is_to_end(trainer)).items():
            self._written = [name if written == old else written for written in self._written]
            print(
                f"{self._place.path_of(old)} is after step {step}, from which the run continues: renamed to {name}.",
                flush=True,
            )

    def _save(self, trainer: Trainer, step: int) -> None:
        self._due = False
        self._end_outages(trainer)
        path = self.path_of(step)
        name = Path(path).name
        self._written = [*(written for written in self._written if written != name), name]
        self._restored.discard(name)
        fault = _attempt(lambda: trainer.save_checkpoint(path), trainer.strategy.barrier)
        self._saved_step, saved = step, fault is None
        if saved and trainer.is_global_zero and isinstance(self._io, StagesUploads):
            fault = _attempt(self._io.require_uploaded)  # other ranks may know a moment earlier or later
        self._raise_on_all(trainer, fault, of_storage=saved)
        self._place.saved(name)
        self.last_model_path = str(path)
        if isinstance(self._io, MeasuresStall):
            for logger in trainer.loggers:
                logger.log_metrics({"checkpoint/stall_s": self._io.stall_s}, step=step)
        self._prune(trainer)

    def _wait(self) -> None:
        if isinstance(self._io, WaitsForDisk):
            self._io.wait()

    def _settle(self, trainer: Trainer) -> None:
        """Waits until what was saved is complete."""
        self._end_outages(trainer)
        self._raise_on_all(trainer, _attempt(self._wait))
        self._place.settled()

    def _is_to_end(self, trainer: Trainer) -> bool:
        """Returns whether this rank has received a signal to end."""
        module: Any = trainer.lightning_module
        return trainer.received_sigterm or (module.stop_signals is not None and module.stop_signals.received)

    def _end_outages(self, trainer: Trainer) -> None:
        """Lets no outage of the storage be waited out by a rank that has received a signal."""
        if isinstance(self._io, StagesUploads) and is_url(self.dirpath) and self._is_to_end(trainer):
            self._io.end_soon()

    def _raise_on_all(self, trainer: Trainer, error: ConfigError | None, of_storage: bool = True) -> None:
        """Raises the error of the first rank that has one on every rank: the others would wait for it; called on every rank.

        Where a signal has ended a wait for the storage, the run ends by the signal, with that error as its text.
        """
        own, ranks = (str(error or ""), of_storage), trainer.world_size
        first = torch.tensor(
            ranks if error is None else trainer.global_rank, device=trainer.strategy.root_device
        )
        if (failed := int(trainer.strategy.reduce(first, reduce_op="min"))) == ranks:
            return
        told, of_storage = trainer.strategy.broadcast(own, src=failed)
        if of_storage and is_url(self.dirpath):
            ends = torch.tensor(float(self._is_to_end(trainer)), device=trainer.strategy.root_device)
            if trainer.world_size > 1:
                ends = trainer.strategy.reduce(ends, reduce_op="sum")
            if ends:
                raise SIGTERMException(told) from error
        raise ConfigError(told) from error

    def path_of(self, step: int) -> Path | str:
        """Returns the path, or the URL, of the checkpoint of a step."""
        return self._place.path_of(f"step-{step:08d}.ckpt")

    def _prune(self, trainer: Trainer) -> None:
        """Removes what need not be kept. A checkpoint that is still being written does not count: one more is kept."""
        if not trainer.is_global_zero or self.keep < 0:
            return
        present = sorted(self._place.present(self._written), key=_order)
        for old in present[: -self.keep]:
            step, abandoned = step_named(Path(old)) or 0, ABANDONED in old
            for_good = self.keep_every_n_steps and step % self.keep_every_n_steps == 0 and not abandoned
            if not for_good and old != Path(self.best_model_path).name and self._is_mine(old, trainer):
                trainer.strategy.remove_checkpoint(self._place.path_of(old))
                self._written.remove(old)

    def _is_mine(self, name: str, trainer: Trainer) -> bool:
        """Whether a file that the checkpoint lists as written may be removed: not through a link out of the folder."""
        if is_url(self.dirpath):
            return True
        folder, root = Path(self.dirpath), Path(trainer.default_root_dir)
        within = folder.absolute().is_relative_to(root.absolute())
        leads_out = within and not folder.resolve().is_relative_to(root.resolve())
        return name not in self._restored or not leads_out


def _attempt(action: Callable[[], None], otherwise: Callable[[], None] | None = None) -> ConfigError | None:
    """Returns the error of an action, after what meets the other ranks in its place; None: there was none."""
    try:
        action()
    except ConfigError as error:
        if otherwise is not None:
            otherwise()
        return error
    return None


def _order(name: str) -> tuple[bool, int]:
    return ABANDONED not in name, step_named(Path(name)) or 0
