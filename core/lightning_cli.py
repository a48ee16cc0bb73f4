"""The LightningCLI subclass behind `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import StrategyRegistry

from core import catalog, preflight, run_folder
from core.blame import blame
from core.cli import SECTIONS, Request, differences, option_values
from core.config_files import dump_yaml, parse_yaml
from core.errors import ConfigError, nearest
from core.language_module import LanguageModule
from core.mistakes import explain
from core.print_config import annotating

log = logging.getLogger(__name__)


class NoProfiler(PassThroughProfiler):
    """Hands out one empty context: Lightning's own makes a new one 55 times a step, for 0.1 ms."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """Returns a context that does nothing."""
        return self._nothing


class Parser(LightningArgumentParser):
    """Reports a mistake as a ConfigError: a few lines, without usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises instead of printing the usage and leaving."""
        raise ConfigError(message) from ex


class Cli(LightningCLI):
    """Parses, checks, instantiates and runs one subcommand."""

    def __init__(self, subcommand: str, request: Request) -> None:
        self.request = request
        self.only = subcommand
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
        except ConfigError as error:
            told = option_values(self.request.arguments)
            options = [(key, value) for _, _, key, value in told if key != "print_config"]
            explain(values, self.request.composed.positions, options)
            raise ConfigError("\n".join(str(error).splitlines()[:6])) from error

    def _parse_ckpt_path(self) -> None:
        """Does nothing: the checkpoint's values already lie below what the user wrote."""

    def before_instantiate_classes(self) -> None:
        """Checks the selection, then fixes the run folder."""
        options = self.config[self.only]
        repeatable = options.clone()
        repeatable.pop("ckpt_path", None)
        self.saved_config = self._parser(self.only).dump(repeatable, skip_none=False, skip_validation=True)
        plain, _ = parse_yaml(self.saved_config, "the parsed configuration")
        self.selected = preflight.selection(plain)
        preflight.check(self.selected)
        self.folder = self._choose_folder(Path(options["trainer"]["default_root_dir"]))
        self.plain = {key: value for key, value in plain.items() if key in SECTIONS}
        self.config[self.only] = run_folder.fill_in(options, self.folder)

    def _choose_folder(self, root: Path) -> Path:
        if self.request.checkpoint is not None:
            return run_folder.of_checkpoint(self.request.checkpoint)
        return run_folder.fresh(root) if _get_rank() in (None, 0) else root

    def after_instantiate_classes(self) -> None:
        """Says what was selected, once what can be known to be wrong is known."""
        with _building(), torch.device("meta"):  # finds wrong arguments before hours of preparation
            self.meta_network = self.model.build_network()
        with _building():
            optimizer = self.model.build_optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
            if self.model.build_lr_scheduler is not None:
                self.model.build_lr_scheduler(optimizer)
        if _get_rank() not in (None, 0):
            return
        print(f"{preflight.table(self.selected)}\nRun folder: {self.folder}", flush=True)
        if self.request.checkpoint is not None:
            print(f"From checkpoint: {self.request.checkpoint}", flush=True)
            for line in differences(self.request.stored, self.plain) if self.request.stored else ():
                print(f"  {line}", flush=True)

    def instantiate_classes(self) -> None:
        """Builds everything but the network."""
        with _building():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Puts the callbacks into their declared order, the run's record first."""
        options = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        callbacks = options.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        record = run_folder.RunRecord(self.saved_config, preflight.table(self.selected), self.folder)
        options["callbacks"] = preflight.ordered([record, *callbacks])
        options["default_root_dir"] = str(self.folder)
        options["profiler"] = options.get("profiler") or NoProfiler()
        try:
            return self._instantiate_trainer(options, [])
        except (ValueError, TypeError, MisconfigurationException) as error:
            registered = {entry.name for entry in catalog.entries() if entry.kind == "strategies"}
            _check_name("strategy", options, registered | set(StrategyRegistry.available_strategies()))
            _check_name("accelerator", options, {"gpu", *AcceleratorRegistry.available_accelerators()})
            raise ConfigError(f"trainer: {error}") from error

    def _run_subcommand(self, subcommand: str) -> None:
        """Waits for `start`: what only checks stops here."""

    def start(self) -> None:
        """Runs the subcommand."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.folder} cannot be made: {error.strerror}. Set --trainer.default_root_dir."
            ) from error
        super()._run_subcommand(self.only)

    def predict(self, **kwargs: Any) -> None:
        """Predicts, then writes the log-probabilities (rows, T) of this rank's rows, in nats."""
        from safetensors.torch import save_file

        batches = self.trainer.predict(**kwargs) or []
        rows = torch.cat([batch for batch in batches if isinstance(batch, torch.Tensor)])
        rows = rows[(rows != 0).any(dim=1)]  # without the rows that only fill up the last batch
        name = (
            "predictions" if self.trainer.world_size == 1 else f"predictions.rank{self.trainer.global_rank}"
        )
        path = Path(self.trainer.default_root_dir, f"{name}.safetensors")
        temporary = path.with_suffix(".tmp")
        save_file({"log_probability_nats": rows.contiguous()}, temporary)
        os.replace(temporary, path)
        print(f"Log-probabilities of {rows.numel():,} labels: {path}")


@contextmanager
def _building() -> Iterator[None]:
    """What fails while techniques are built is a wrong value in the configuration, as far as one can tell."""
    ConfigError.latest = None
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        # jsonargparse tells of a technique's complaint in words of its own, without a cause
        raise ConfigError.latest or ConfigError(blame(error)) from error


def _check_name(option: str, options: dict[str, Any], known: set[str]) -> None:
    value = options.get(option)
    if isinstance(value, str) and value not in known | {"auto"}:
        raise ConfigError(f"--trainer.{option}: there is no {option} named {value!r}.{nearest(value, known)}")
