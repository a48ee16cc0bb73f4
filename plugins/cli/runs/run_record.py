"""Records a run's configuration in its folder and in every checkpoint, after the resumed checkpoint was loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core import __version__, durable
from core.contracts import HasTokenizer
from core.data.token_datamodule import TokenDataModule
from core.errors import ConfigError
from core.lightning_compat import set_root_dir
from core.training import validation_steps
from plugins.checkpoints.checkpoint import RECORD
from plugins.checkpoints.kept_files import KEPT, kept_by_a_run, with_template
from plugins.cli.configuration.validation_unit import UNIT
from plugins.cli.runs import lost_ranks
from plugins.cli.runs.run_folder import own
from toolkit.token_ids import ChecksTokenizer

HELD = ("log_hyperparams", "log_graph", "save", "finalize")
"""Calls of loggers that write files, and that Lightning makes before it restores the checkpoint or when that fails."""


class _HeldCalls:
    """Delays calls of loggers until the checkpoint has been restored."""

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
        _create(self.loggers)
        for logger, name, args, kwargs in self.calls:
            getattr(logger, name)(*args, **kwargs)


def _create(loggers: list[Any]) -> None:
    """Has loggers begin their files, as Lightning would have before all else."""
    for logger in loggers:
        getattr(logger, "experiment", None)


class RunRecord(Callback):
    """Writes the full config and the selected techniques into the run folder and every checkpoint.

    A run writes nothing before its data and the objective are known to have the same tokenizer, and a resumed one nothing before
    the complete checkpoint has been restored: weights, optimizer, position in the data.

    Args:
        config: The resolved configuration as YAML.
        techniques: The table of what was selected.
        folder: The run folder, chosen by rank 0, which broadcasts it.
        job: Name of the job from :func:`plugins.cli.runs.restarts.job`, if its launcher may restart it.
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
        self._kept: Mapping[str, str] = {}

    def hide_loggers(self, trainer: Trainer) -> None:
        """Takes the loggers from the trainer until `setup`: before it, Lightning has each create its files."""
        self._hidden, trainer.loggers = trainer.loggers, []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agrees on the folder over all ranks and writes the record on rank 0."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))
        set_root_dir(trainer, self.folder)
        _check_tokenizer(trainer, pl_module)
        trainer.loggers = self._hidden or trainer.loggers
        self._own()
        lost_ranks.watch()
        self._stage = str(getattr(stage, "value", stage))
        if self.checkpoint is None:
            if self._stage == "fit" and (weights := getattr(pl_module, "weights", None)):
                self._kept = kept_by_a_run(weights)
            _create(trainer.loggers)
            self._write()
        else:
            self._held = _HeldCalls(trainer.loggers)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The run is over: a rank that ends from now on is not lost."""
        lost_ranks.stop_watching()

    @rank_zero_only
    def _own(self) -> None:
        # After the broadcast above: a rank that starts later would take this start for an earlier one of the job.
        if self.job:
            own(self.folder, self.job)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Checks that the checkpoint has the optimizer's state: training would silently continue with a new one.

        Raises:
            ConfigError: If it has none.
        """
        self._kept = checkpoint.get(KEPT, {})
        if trainer.state.fn != "fit" or not trainer.strategy.lightning_restore_optimizer:
            return
        states = checkpoint.get("optimizer_states")
        if not states or (checkpoint.get("global_step") and any(map(_lost, states))):
            raise ConfigError(
                f"{self.checkpoint or 'The checkpoint'} holds no state of the optimizer: the run would continue with a "
                "new one.\nGive a checkpoint that a run has written (--ckpt_path RUN_FOLDER), or leave --ckpt_path out to start from the beginning.\n"
                "To start a new run from its weights alone: --model.weights=PATH instead of --ckpt_path."
            )
        if not checkpoint.get("lr_schedulers") and getattr(pl_module, "build_lr_scheduler", None):
            self._notes.append("The checkpoint holds no state of a schedule: it begins at its first step.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the record: the checkpoint has been restored. Checks the validation interval first."""
        # Here, because the module's own hook runs after those of callbacks, which write files.
        validation_steps.check_epoch(trainer)
        self._accept()
        if trainer.is_global_zero:
            _print_padding(getattr(trainer, "datamodule", None))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the record in `validate`; in `fit`, `on_train_start` does."""
        if trainer.state.fn == "validate":
            self._accept()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the record: the checkpoint has been restored."""
        self._accept()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the record: the checkpoint has been restored."""
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
                "Set --trainer.default_root_dir to a folder that can, or repair that one."
            ) from error

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stores the configuration, so that the checkpoint can be read without its folder, and what came with weights."""
        record = {"config": self.config, "version": __version__, "ranks": trainer.world_size}
        checkpoint[RECORD] = record | {UNIT: "steps"}
        if kept := with_template(self._kept, getattr(trainer, "datamodule", None)):
            checkpoint[KEPT] = kept


def _lost(optimizer: Mapping[str, Any]) -> bool:
    """Returns whether the state is empty of an optimizer that keeps moments of gradients."""
    keeps = any("betas" in group or group.get("momentum") for group in optimizer["param_groups"])
    return keeps and not optimizer["state"]


def _print_padding(data: Any) -> None:
    """Prints what share of the training rows is padding, where there is any."""
    loader = data.training_loader if isinstance(data, TokenDataModule) else None
    if loader is not None and (shares := loader.batches.padding()):
        names = ", ".join(
            f"{s:.2%}" + (f" ({name})" if len(shares) > 1 else "") for name, s in shares.items()
        )
        print(f"Padding in rows of {data.sequence_length:,} tokens: {names}", file=sys.stderr, flush=True)


def _check_tokenizer(trainer: Trainer, pl_module: Any) -> None:
    """Has the objective of a run that trains compare the tokenizer of the data, which are set up by now."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if trainer.state.fn == "fit" and isinstance(data, HasTokenizer):
        for part in pl_module.objective.modules():
            if isinstance(part, ChecksTokenizer):
                part.check_tokenizer(data.tokenizer_json)
