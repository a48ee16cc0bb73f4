"""Builds and runs the trainer, model and data of one `fit`, `validate`, `test` or `predict`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils._pytree import tree_leaves

from core import durable, lightning_compat
from core.contracts.modules import check_fit
from core.errors import ConfigError
from core.language_module import LanguageModule
from core.training.network_changes import apply_network_changes
from plugins.checkpoints.remote_copies import shown
from plugins.cli import preflight
from plugins.cli.configuration.builder import Builder
from plugins.cli.configuration.building import (
    OWN_PRECISION,
    devices_of,
    explain_build_error,
    hardware_of,
    make_trainer,
    placed_warnings,
)
from plugins.cli.configuration.class_check import check_classes
from plugins.cli.configuration.parsing import Parsed, as_text
from plugins.cli.configuration.request import SECTIONS, Request, differences
from plugins.cli.configuration.trust import trusting
from plugins.cli.runs import (
    claims,
    cuda_memory,
    gathered_checkpoints,
    launchers,
    lost_ranks,
    restarts,
    run_folder,
)
from plugins.cli.runs.advice import advice
from plugins.cli.runs.checkpoint_errors import raise_if_from_checkpoint
from plugins.cli.runs.network_draft import NetworkDraft
from plugins.cli.runs.no_profiler import NoProfiler
from plugins.cli.runs.run_record import RunRecord
from plugins.cli.selection import by_trainer, describe_parts, selection, table
from toolkit.adapters import Adapter
from toolkit.ranks import launched_rank
from toolkit.selection import Run, Selected

INEXACT = (
    "Not bitwise as without the stop: some GPU kernels add gradients in any order. It is so in a run that has "
    "--trainer.deterministic=true from the first step on."
)
"""Said where a run resumes on CUDA; also of "warn", with which torch keeps attention's backward as it is."""


class BuiltRun:
    """Parses, checks and builds a run of one command, which `start` then runs.

    Args:
        command: fit, validate, test or predict.
        request: The configuration and arguments of the user, composed.
        starts: Whether the run will be started, and its folder is made.

    Attributes:
        trainer: The trainer, its callbacks in the order in which they act.
        model: The LanguageModule that is trained.
        datamodule: The data.
        network_summary: The class of the network, how many parameters it has, and how many are trained if not all.

    Raises:
        ConfigError: With every mistake in the run that can be found before it starts.
    """

    folder: Path

    def __init__(self, command: str, request: Request, starts: bool) -> None:
        self.request, self.only, self.starts = request, command, starts
        self.builder = Builder(lambda value: run_folder.fill_in(value, self.folder))
        with trusting(request.trust), self._releasing(done=False):
            self.parsed = Parsed(command, request)
            self._set_seed()
            self._check()
            self.folder = self._choose_folder(Path(self.config["trainer"]["default_root_dir"]))
            self._build()
            self._check_parts()
            self._print_selection()

    @contextmanager
    def _releasing(self, done: bool) -> Iterator[None]:
        """Releases the claimed run folder if the block fails, or, with `done`, when it ends."""
        self.claim: run_folder.Claim | None = getattr(self, "claim", None)
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if self.claim and (done or failure):
                self.claim.release(failure, self.request.job)

    # -- checks ---------------------------------------------------------------------------------------

    def _set_seed(self) -> None:
        """Sets the seed and records it in the configuration; raises a ConfigError if it is out of range."""
        seed = self.parsed.values["seed_everything"]
        if seed is False:
            return
        try:
            self.parsed.values["seed_everything"] = seed_everything(
                None if seed is True else seed, workers=True
            )
        except ValueError as error:
            raise ConfigError(
                f"{self.parsed.where(('seed_everything',))}: seed_everything is {seed}, not one of 0 to {2**32 - 1}."
            ) from error

    def _check(self) -> None:
        """Raises a ConfigError with every mistake that can be found before the run is built."""
        values, where = self.parsed.values, self.parsed.where
        if values["trainer"]["default_root_dir"] is None:
            raise ConfigError(
                f"{where(('trainer', 'default_root_dir'))}: trainer.default_root_dir is null. Name a folder, or leave it "
                "out: runs/NAME_OF_CONFIG."
            )
        if values.get("weights_only") is False:
            raise ConfigError(
                f"{where(('weights_only',))}: weights_only is false: a checkpoint is read as tensors and plain values only, "
                "because a pickle can run code. Leave it out."
            )
        self.config = config = self.parsed.plain()
        # Lightning also loads checkpoints itself, such as OnExceptionCheckpoint's.
        if "weights_only" in values:
            values["weights_only"] = True
        run_folder.check_placeholders(config, where)
        check_classes(config, where)  # before any module that it names is imported
        self.selected = selection(config)
        self._check_selection(config)

    def _check_selection(self, config: dict[str, Any]) -> None:
        options, offline = config["trainer"], self.request.offline
        devices, nodes = (
            n if isinstance(n := options[name], int) else 1 for name in ("devices", "num_nodes")
        )

        def run(selected: list[Selected], accelerator: str, devices: int, processes: int) -> Run:
            places = self.parsed.places
            return Run(selected, config, places, accelerator, devices, processes, offline, self.only)

        self.run_known = run(self.selected, str(options["accelerator"]), devices, devices * nodes)
        try:
            with self._building():
                hardware = hardware_of(options, self.run_known)
        except ConfigError as error:
            preflight.check(self.run_known, str(error))
        selected = [*self.selected, *_implied(hardware, self.selected)]
        devices, nodes = devices_of(hardware), getattr(hardware.strategy, "num_nodes", 1)
        faults = (
            () if offline else launchers.faults(hardware.cluster_environment, devices, nodes, self.selected)
        )
        accelerator = hardware.accelerator.name()
        self.run_checked = run(selected, accelerator, devices, devices * nodes)
        preflight.check(self.run_checked, *faults)
        if self.starts and accelerator == "cuda":
            cuda_memory.let_segments_grow()

    def _choose_folder(self, root: Path) -> Path:
        first, job = launched_rank() in (None, 0), self.request.job
        run_folder.check_plain(root)
        if self.request.folder is not None:
            folder = self.request.folder
            if first and self.starts and self.only == "fit":
                claims.take_claim(folder, job)
                self.claim = run_folder.Claim(folder)
        elif first:
            there = run_folder.present(root)
            folder = run_folder.fresh(root, claim=self.starts, job=job)
            self.claim = run_folder.claimed(folder, there) if self.starts else None
        else:
            folder = root
        return folder

    # -- building -------------------------------------------------------------------------------------

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Reports an error while techniques are built as a wrong value in the configuration, with its place."""
        self.builder.failed = None
        try:
            yield
        except Exception as error:
            if isinstance(error, ConfigError) and self.builder.failed is None:
                raise
            target, cause = self.builder.failed or (None, error)
            if not isinstance(cause, ConfigError):
                self.parsed.explain()
            raise ConfigError(explain_build_error(target, cause, self.run_known)) from cause

    def _build(self) -> None:
        """Builds trainer, model and data module; the network is built in :meth:`_check_parts`."""
        self.parsed.parser.add_instantiator(self.builder, object)
        with self._building(), placed_warnings(self.run_known):
            built = self.parsed.parser.instantiate_classes(self.parsed.values)
            self.datamodule: LightningDataModule = built["data"]
            self.model: LanguageModule = built["model"]
            self.arguments = {name: built[name] for name in self.parsed.method_arguments}
            self.trainer = self._trainer(built["trainer"])
            adapted = any(isinstance(callback, Adapter) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
            self.unread: str | None = None
            if self.request.checkpoint is not None and not adapted:
                stored = ((self.request.stored or {}).get("model") or {}).get("weights")
                self.unread = None if self.model.weights == stored else self.model.weights
                self.model.weights = None  # the checkpoint's are taken, and the file may be gone

    def _trainer(self, given: Mapping[str, Any]) -> Trainer:
        """Builds the Trainer with the run's record, and sorts the callbacks into their declared order."""
        options = {name: run_folder.fill_in(value, self.folder) for name, value in given.items()}
        callbacks = options.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        # validate, test and predict leave record and figures of the training run unchanged
        is_evaluation = self.only != "fit" and self.request.checkpoint is not None
        text = as_text(self.config) if self.starts else ""
        self.record = record = RunRecord(
            text, "", self.folder, self.request.job, self.request.checkpoint, writes=not is_evaluation
        )
        if is_evaluation:
            options["logger"] = False
            self.selected = [
                item for item in self.selected if item.kind != "loggers" and "logger" not in item.key
            ]
        options["callbacks"] = [record, *callbacks]
        options["default_root_dir"] = str(self.folder)
        options["profiler"] = options.get("profiler") or NoProfiler()
        trainer = make_trainer(options, self.run_known)
        trainer.callbacks = preflight.ordered(trainer.callbacks)  # type: ignore[attr-defined]
        self.selected += by_trainer(trainer, self.selected)
        record.techniques = table(self.selected)
        return trainer

    def _check_parts(self) -> None:
        """Finds wrong arguments of network, optimizer and schedule before anything is launched, written or prepared."""
        with self._building():
            self.model.build_network = draft = NetworkDraft(self.model.build_network, self.trainer)
            assert draft.network is not None
            with torch.device("meta"):
                network = apply_network_changes(draft.network, self.trainer, self.model.weights)
        # If the vocabulary is not known before the data are prepared, `configure_model` checks the one that they have.
        self.model.fits = check_fit(network, self.datamodule)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        if self.only == "fit":
            gathered_checkpoints.check(self.trainer, parameters)
        trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        share = f", {trained:,} of them trained ({trained / parameters:.2%})" if trained < parameters else ""
        self.network_summary = f"{type(network).__name__}: {parameters:,} parameters{share}"
        self.advice = list(advice(self.run_checked, network)) if self.only == "fit" else []
        with self._building():
            optimizer = self.model.build_optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
            if self.model.build_lr_scheduler is not None:
                self.model.build_lr_scheduler(optimizer)

    def _print_selection(self) -> None:
        """Prints the selected techniques, and differences from the configuration in the checkpoint."""
        if launched_rank() not in (None, 0):
            return
        network = f"{self.network_summary}\n" if self.starts else ""  # `check` ends with it
        print(f"{table(self.selected)}\n{network}Run folder: {self.folder}", flush=True)
        for line in self.advice:
            print(line, flush=True)
        if self.request.checkpoint is not None:
            print(f"From checkpoint: {shown(self.request.checkpoint)}", flush=True)
            current = {key: value for key, value in self.config.items() if key in SECTIONS}
            for line in differences(self.request.stored, current) if self.request.stored else ():
                print(f"  {line}", flush=True)
            if self.unread:
                print(
                    f"model.weights={self.unread} is not read: the weights are those of the checkpoint.",
                    flush=True,
                )
            device, exact = self.trainer.strategy.root_device.type, self.config["trainer"]["deterministic"]
            if self.only == "fit" and device == "cuda" and exact is not True:
                print(INEXACT, flush=True)

    # -- running --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Runs the command."""
        with self._releasing(done=True):
            try:
                if self.request.job and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    restarts.use_store_per_restart()
                lightning_compat.before_all_are_killed(lost_ranks.report_dead_ranks)
                self.record.hide_loggers(self.trainer)
                method = predict if self.only == "predict" else getattr(Trainer, self.only)
                method(self.trainer, model=self.model, datamodule=self.datamodule, **self.arguments)
                if self.request.job and self.trainer.world_size > 1:
                    self.trainer.strategy.barrier()  # if a rank fails as it ends, the launcher may restart all of them
            except Exception as error:
                # Of a checkpoint that Lightning chose, such as OnExceptionCheckpoint's.
                if isinstance(error, UnpicklingError):
                    raise ConfigError(
                        "A checkpoint that a callback left holds more than tensors and plain values, which could run code,"
                        "\nor is damaged. Delete it, or name another to go on from: --ckpt_path CHECKPOINT."
                    ) from error
                if self.request.checkpoint is not None:
                    raise_if_from_checkpoint(error, self.request.checkpoint, self.trainer)
                raise
            except SIGTERMException:
                signals = self.model.stop_signals
                if signals is not None and signals.requeue and self.trainer.is_global_zero:
                    launchers.queue_again()
                raise


def predict(trainer: Trainer, **arguments: Any) -> None:
    """Predicts, then writes the log-probabilities (rows, T) of this rank's rows, in nats; shorter rows are padded with 0."""
    from safetensors.torch import save_file

    if arguments.get("return_predictions") is False:
        raise ConfigError("--return_predictions=false: predict writes what is returned. Leave it out.")
    batches = trainer.predict(**arguments)
    found = [row for batch in tree_leaves(batches) if isinstance(batch, torch.Tensor) for row in batch]
    if not found:
        raise ConfigError(
            "Nothing was predicted, and nothing is written: there is no batch (--trainer.limit_predict_batches?)."
        )
    rows = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    rows = rows[(rows != 0).any(dim=1)]  # without the rows that pad the last batch
    name = "predictions" if trainer.world_size == 1 else f"predictions.rank{trainer.global_rank}"
    path = Path(trainer.default_root_dir, f"{name}.safetensors")
    with durable.replacing(path) as temporary:
        save_file({"log_probability_nats": rows.contiguous()}, temporary)
    print(f"Log-probabilities of {int((rows != 0).sum()):,} labels: {path}")


def _implied(hardware: Any, selected: list[Selected]) -> list[Selected]:
    """Returns the strategy and the precision that are selected by a word, such as `auto`, unless a class is."""
    classes = [item.target for item in selected if isinstance(item.target, type)]
    chosen = tuple(kind for kind in (Strategy, Precision) if any(issubclass(one, kind) for one in classes))
    if any(issubclass(kind, OWN_PRECISION) for kind in classes):
        chosen += (Precision,)
    parts = {"trainer.strategy": hardware.strategy, "trainer.precision": hardware.precision_plugin}
    return [item for item in describe_parts(parts.items(), selected) if not issubclass(item.target, chosen)]
