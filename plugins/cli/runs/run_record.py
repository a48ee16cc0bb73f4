"""What a run writes of itself, into its folder and every checkpoint; nothing before a checkpoint has been accepted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core import __version__
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from core.lightning_compat import set_root_dir
from core.training import validation_steps
from plugins.checkpoints.checkpoint import RECORD
from plugins.cli.configuration.validation_unit import UNIT
from plugins.cli.runs import lost_ranks
from plugins.cli.runs.run_folder import own
from toolkit import durable

HELD = ("log_hyperparams", "log_graph", "save", "finalize")
"""Calls with which Lightning lets loggers make their files, before it has restored the checkpoint or where it fails."""


class _HeldCalls:
    """Keeps what loggers are called with before a checkpoint has been accepted, and calls them with it then."""

    def __init__(self, loggers: list[Any]) -> None:
        self.loggers, self.calls = loggers, list[tuple[Any, ...]]()
        for logger in loggers:
            for name in HELD:
                setattr(logger, name, partial(self._keep, logger, name))

    def _keep(self, logger: Any, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((logger, name, args, kwargs))

    def release(self) -> None:
        for logger in self.loggers:
            for name in HELD:
                vars(logger).pop(name, None)
            getattr(logger, "experiment", None)  # which Lightning would have had made before anything else
        for logger, name, args, kwargs in self.calls:
            getattr(logger, name)(*args, **kwargs)


class RunRecord(Callback):
    """Writes the full config and the selected techniques into the run folder and every checkpoint.

    A resumed run writes nothing before all of the checkpoint has been accepted: weights, optimizer,
    position of the data.

    Args:
        config: The resolved configuration as YAML.
        techniques: The table of what was selected.
        folder: The run folder as rank 0 chose it; other ranks take it over from there.
        job: What the launcher calls the job, if it may start it again.
        checkpoint: The checkpoint that the run resumes.
        writes: Whether files are written into the folder.
    """

    def __init__(
        self,
        config: str,
        techniques: str,
        folder: Path,
        job: str | None = None,
        checkpoint: Path | None = None,
        writes: bool = True,
    ) -> None:
        self.config, self.writes = config, writes
        self.techniques = techniques
        self.folder, self.job, self.checkpoint = folder, job, checkpoint
        self._hidden: list[Any] = []
        self._held: _HeldCalls | None = None
        self._notes: list[str] = []

    def hide_loggers(self, trainer: Trainer) -> None:
        """Keeps loggers from Lightning until `setup`: before it, Lightning lets each make its files."""
        if self.checkpoint is not None:
            self._hidden, trainer.loggers = trainer.loggers, []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agrees on the folder over all ranks and writes the record on rank 0."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))
        set_root_dir(trainer, self.folder)
        self._own()
        lost_ranks.watch()
        self._stage = str(getattr(stage, "value", stage))
        if self.checkpoint is None:
            self._write()
        else:
            trainer.loggers = self._hidden or trainer.loggers
            self._held = _HeldCalls(trainer.loggers)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The run is over: nobody is lost any more."""
        lost_ranks.stop_watching()

    @rank_zero_only
    def _own(self) -> None:
        # Not before all ranks have met: of a folder that is the job's, each takes the last checkpoint.
        if self.job:
            own(self.folder, self.job)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Makes sure that training goes on with the optimizer's state, not silently with a fresh one.

        Raises:
            ConfigError: If the checkpoint has none.
        """
        if trainer.state.fn != "fit" or not trainer.strategy.lightning_restore_optimizer:
            return
        states = checkpoint.get("optimizer_states")
        if not states or (checkpoint.get("global_step") and any(map(_lost, states))):
            raise ConfigError(
                f"{self.checkpoint or 'The checkpoint'} holds no state of the optimizer: the run would go on with a "
                "fresh one.\nGive a checkpoint that a run has written (--ckpt_path RUN_FOLDER), or leave --ckpt_path out to start from the beginning.\n"
                "Starting a run from weights alone is not supported."
            )
        if not checkpoint.get("lr_schedulers") and getattr(pl_module, "build_lr_scheduler", None):
            self._notes.append("The checkpoint holds no state of a schedule: it begins at its first step.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The checkpoint has been accepted, and nothing that is known only now refuses the run."""
        validation_steps.check_epoch(trainer)  # the module's own comes behind what callbacks write
        self._accept()
        if trainer.is_global_zero:
            _say_padding(getattr(trainer, "datamodule", None))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The checkpoint has been accepted, unless this comes before training."""
        if trainer.state.fn == "validate":
            self._accept()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The checkpoint has been accepted."""
        self._accept()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The checkpoint has been accepted."""
        self._accept()

    def _accept(self) -> None:
        if self._held is None:
            return
        held, self._held = self._held, None
        self._write()
        held.release()

    @rank_zero_only
    def _write(self) -> None:
        for note in self._notes:
            print(note, file=sys.stderr, flush=True)
        if not self.writes:
            return
        name = "config" if self._stage == "fit" else f"config-{self._stage}"
        path = self.folder / f"{name}.yaml"
        try:
            if path.exists() and path.read_text(encoding="utf-8", errors="replace") != self.config:
                earlier = len(list(self.folder.glob(f"{name}.[0-9]*.yaml")))
                path.rename(path.with_name(f"{name}.{earlier + 1}.yaml"))
            durable.write(path, self.config)
            durable.write(self.folder / "techniques.txt", self.techniques + "\n")
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.folder} cannot be written: {error.strerror}.\n"
                "Set --trainer.default_root_dir to a folder that can, or mend that one."
            ) from error

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the configuration in the checkpoint, so that it can be read without its folder."""
        record = {"config": self.config, "version": __version__, "ranks": trainer.world_size}
        checkpoint[RECORD] = record | {UNIT: "steps"}


def _lost(optimizer: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer that keeps moments of gradients is empty."""
    keeps = any("betas" in group or group.get("momentum") for group in optimizer["param_groups"])
    return keeps and not optimizer["state"]


def _say_padding(data: Any) -> None:
    """Prints what share of the training rows is padding, where there is any."""
    loader = data.training_loader if isinstance(data, TokenDataModule) else None
    if loader is not None and (shares := loader.batches.padding()):
        names = ", ".join(
            f"{s:.2%}" + (f" ({name})" if len(shares) > 1 else "") for name, s in shares.items()
        )
        print(f"Padding in rows of {data.sequence_length:,} tokens: {names}", file=sys.stderr, flush=True)
