"""The LightningCLI subclass behind `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils._pytree import tree_leaves

from core import preflight
from core.configuration.arguments import option_values
from core.configuration.blame import blame, useful
from core.configuration.building import Builder, changed, complaint, make_trainer, word_for
from core.configuration.class_check import check_classes
from core.configuration.config_files import dump_yaml, parse_yaml
from core.configuration.mistakes import explain, finder, laid_over
from core.configuration.print_config import annotating
from core.configuration.request import SECTIONS, Request, differences
from core.contracts import check_fit
from core.errors import ConfigError
from core.files import durable
from core.language_module import LanguageModule
from core.runs import launchers, restarts, run_folder
from core.runs.every_step import NoProfiler
from core.runs.stopping import queue_again
from core.selection import Run, Selected, by_trainer, selection, table

log = logging.getLogger(__name__)


class Parser(LightningArgumentParser):
    """Reports a mistake as a ConfigError: a few lines, without usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises instead of printing the usage and leaving."""
        raise ConfigError(message) from ex


class Cli(LightningCLI):
    """Parses, checks, instantiates and runs one subcommand."""

    def __init__(self, subcommand: str, request: Request, starts: bool) -> None:
        self.request, self.only, self.starts = request, subcommand, starts
        self.builder = Builder()
        with self._releasing(done=False):
            super().__init__(
                model_class=LanguageModule,
                datamodule_class=LightningDataModule,
                subclass_mode_data=True,
                save_config_callback=None,
                seed_everything_default=0,
                parser_class=Parser,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )

    @contextmanager
    def _releasing(self, done: bool) -> Iterator[None]:
        """Gives the claimed run folder back when this fails, or is all that was to be done."""
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

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Builds the parser of the one subcommand that is run: each takes 0.3 s."""
        return {self.only: LightningCLI.subcommands()[self.only]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Takes no abbreviations: `--trainer.max_step` is a mistake, not `max_steps`."""
        return super().init_parser(**{"allow_abbrev": False, **kwargs})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the composed values, then the arguments over them."""
        values = self.request.composed.values
        config = ["--config", dump_yaml(values)] if values else []
        try:
            with annotating(self.request.arguments) as arguments:
                self.config = parser.parse_args([self.only, *config, *arguments])
        except SystemExit as error:  # by --help and --print_config, or by a module that is imported
            if all(frame.f_code.co_name != "<module>" for frame, _ in walk_tb(error.__traceback__)):
                raise
            self._explain()
            raise ConfigError(blame(error)) from error
        except ConfigError as error:
            self._explain()
            key = re.match(r'Parser key "(.*)":', str(error))
            where = f"{finder(self._places())(tuple(key[1].split('.')))}: " if key else ""
            raise ConfigError(where + "\n".join(useful(str(error)).splitlines()[:6])) from error

    def _explain(self) -> None:
        explain(self.request.composed.values, self.request.composed.positions, self._options())

    def _options(self) -> list[tuple[str, str]]:
        told = option_values(self.request.arguments)
        return [(key, value) for _, _, key, value in told if key != "print_config"]

    def _parse_ckpt_path(self) -> None:
        """Does nothing: the checkpoint's values already lie below what the user wrote."""

    def _set_seed(self) -> None:
        """Sets the seed, or says which seeds there are."""
        try:
            super()._set_seed()
        except ValueError as error:
            seed = self.config[self.only]["seed_everything"]
            place = self._places().get(("seed_everything",), "")
            where = f"{place}: ".removeprefix(f"{os.getcwd()}/") if place else ""
            raise ConfigError(f"{where}seed_everything is {seed}, not one of 0 to {2**32 - 1}.") from error

    def _places(self) -> dict[tuple[str | int, ...], str]:
        composed = self.request.composed
        return laid_over(composed.values, composed.positions, self._options())[1]

    def before_instantiate_classes(self) -> None:
        """Checks the selection, then fixes the run folder."""
        options = self.config[self.only]
        repeatable = options.clone()
        repeatable.pop("ckpt_path", None)
        self.saved_config = self._parser(self.only).dump(repeatable, skip_none=False, skip_validation=True)
        plain, _ = parse_yaml(self.saved_config, "the parsed configuration")
        self.selected = selection(plain)
        self._check(plain)
        self.folder = self._choose_folder(Path(options["trainer"]["default_root_dir"]))
        self.plain = {key: value for key, value in plain.items() if key in SECTIONS}
        self.config[self.only] = run_folder.fill_in(options, self.folder)

    def _check(self, config: dict[str, Any]) -> None:
        """Raises a ConfigError with all that is wrong with the run, as far as it shows before it is built."""
        options, places = config["trainer"], self._places()
        check_classes(config, finder(places))
        devices, nodes = (
            n if isinstance(n := options[name], int) else 1 for name in ("devices", "num_nodes")
        )
        elsewhere = self.request.elsewhere
        on = str(options["accelerator"])
        run = Run(self.selected, config, places, on, devices, devices * nodes, elsewhere, self.only)
        self.run_known = run
        try:
            with self._building():
                outline = _outline(options, run)
        except ConfigError as error:
            preflight.check(run, str(error))
        selected = [*self.selected, *_implied(outline, self.selected)]
        devices, on = outline.num_devices, outline.accelerator.name()
        processes = devices * outline.num_nodes
        run = Run(selected, config, places, on, devices, processes, elsewhere, self.only)
        preflight.check(run, *(() if elsewhere else launchers.faults(outline, self.selected)))

    def _choose_folder(self, root: Path) -> Path:
        first, job = _get_rank() in (None, 0), self.request.job
        if self.request.checkpoint is not None:
            folder = run_folder.of_checkpoint(self.request.checkpoint)
            self.claim = run_folder.Claim(folder) if first and job and self.starts else None
        elif first:
            there = run_folder.present(root)
            folder = run_folder.fresh(root, claim=self.starts, job=job)
            self.claim = run_folder.claimed(folder, there) if self.starts else None
        else:
            folder = root
        return folder

    def after_instantiate_classes(self) -> None:
        """Says what was selected, once what can be known to be wrong is known."""
        with self._building(), torch.device("meta"):  # finds wrong arguments before hours of preparation
            self.meta_network = changed(self.model.build_network(), self.trainer)
        check_fit(self.meta_network, self.datamodule)
        with self._building():
            optimizer = self.model.build_optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
            if self.model.build_lr_scheduler is not None:
                self.model.build_lr_scheduler(optimizer)
        if _get_rank() not in (None, 0):
            return
        print(f"{table(self.selected)}\nRun folder: {self.folder}", flush=True)
        if self.request.checkpoint is not None:
            print(f"From checkpoint: {self.request.checkpoint}", flush=True)
            for line in differences(self.request.stored, self.plain) if self.request.stored else ():
                print(f"  {line}", flush=True)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """What fails while techniques are built is a wrong value in the configuration, as far as one can tell."""
        self.builder.failed = None
        try:
            yield
        except Exception as error:
            if isinstance(error, ConfigError) and self.builder.failed is None:
                raise
            target, cause = self.builder.failed or (None, error)
            if not isinstance(cause, ConfigError):
                self._explain()
            raise ConfigError(complaint(target, cause, self.run_known)) from cause

    def instantiate_classes(self) -> None:
        """Builds everything but the network."""
        self.parser.add_instantiator(self.builder, object)
        with self._building():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts the callbacks into their declared order, the run's record before them."""
        options = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        callbacks = options.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        record = run_folder.RunRecord(self.saved_config, "", self.folder, self.request.job)
        options["callbacks"] = [record, *callbacks]
        options["default_root_dir"] = str(self.folder)
        options["profiler"] = options.get("profiler") or NoProfiler()
        trainer = make_trainer(options, self.run_known)
        trainer.callbacks = preflight.ordered(trainer.callbacks)  # type: ignore[attr-defined]
        self.selected += by_trainer(trainer, self.selected)
        record.techniques = table(self.selected)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Waits for `start`: what only checks stops here."""

    def start(self) -> None:
        """Runs the subcommand."""
        with self._releasing(done=True):
            try:
                if self.request.job and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    restarts.keep_apart()
                super()._run_subcommand(self.only)
                if self.request.job and self.trainer.world_size > 1:
                    self.trainer.strategy.barrier()  # a rank that fails as it ends may have all started again
            except SIGTERMException:
                signals = self.model.stop_signals
                if signals is not None and signals.requeue and self.trainer.is_global_zero:
                    queue_again()
                raise

    def predict(self, **kwargs: Any) -> None:
        """Predicts, then writes the log-probabilities (rows, T) of this rank's rows, in nats; 0 behind shorter rows."""
        from safetensors.torch import save_file

        if kwargs.get("return_predictions") is False:
            raise ConfigError("--return_predictions=false: predict writes what is returned. Leave it out.")
        batches = self.trainer.predict(**kwargs)
        found = [row for batch in tree_leaves(batches) if isinstance(batch, torch.Tensor) for row in batch]
        if not found:
            raise ConfigError(
                "Nothing was predicted, and nothing is written: there is no batch (--trainer.limit_predict_batches?)."
            )
        rows = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        rows = rows[(rows != 0).any(dim=1)]  # without the rows that only fill up the last batch
        name = (
            "predictions" if self.trainer.world_size == 1 else f"predictions.rank{self.trainer.global_rank}"
        )
        path = Path(self.trainer.default_root_dir, f"{name}.safetensors")
        with durable.replacing(path) as temporary:
            save_file({"log_probability_nats": rows.contiguous()}, temporary)
        print(f"Log-probabilities of {int((rows != 0).sum()):,} labels: {path}")


def _outline(options: Mapping[str, Any], run: Run) -> Trainer:
    """Makes a trainer of those options that are words and numbers; it knows what Lightning takes them for."""
    names = ("accelerator", "devices", "num_nodes", "strategy", "precision")
    words = {name: options[name] for name in names if not isinstance(options[name], Mapping)}
    if isinstance(options["accelerator"], Mapping):
        words["accelerator"] = word_for(resolve_name(options["accelerator"]["class_path"]))
    extras = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run's own trainer warns
        return make_trainer(words | dict.fromkeys(extras, False), run)


def _implied(outline: Trainer, selected: list[Selected]) -> list[Selected]:
    """Returns the strategy and the precision that are chosen by a word; both depend on a strategy's class."""
    classes = [item.target for item in selected if isinstance(item.target, type)]
    if any(issubclass(kind, Strategy) for kind in classes):
        return []
    chosen = Precision if any(issubclass(kind, Precision) for kind in classes) else ()
    return [item for item in by_trainer(outline, selected) if not issubclass(item.target, chosen)]
