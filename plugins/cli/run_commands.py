"""fit, validate, test and predict: Lightning's Trainer on composed configs, with preflight and one run folder.

`main` is the command line, so every command imports this module: functions of a run import what they need themselves.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from plugins.cli.dispatch import main
from plugins.cli.error_messages import chain

__all__ = ["build", "fit", "main", "predict", "quieten", "started", "test", "validate"]

_SOURCE = "LightningCLI of lightning 2.6, composed configs and preflight on top"


@technique(paper=_SOURCE, offers=("command_line",))
def fit(arguments: list[str]) -> int:
    """Trains a network: --config NAME_OR_FILE (several compose), --ckpt_path last resumes."""
    return _run("fit", arguments)


@technique(paper=_SOURCE)
def validate(arguments: list[str]) -> int:
    """Computes loss and perplexity of a checkpoint on the validation data."""
    return _run("validate", arguments)


@technique(paper=_SOURCE)
def test(arguments: list[str]) -> int:
    """Computes loss and perplexity of a checkpoint on the test split (data.test_fraction), else on the validation data."""
    return _run("test", arguments)


@technique(paper=_SOURCE)
def predict(arguments: list[str]) -> int:
    """Writes the log-probability of every label token to predictions.safetensors in the run folder."""
    return _run("predict", arguments)


def _run(subcommand: str, arguments: list[str]) -> int:
    return started(lambda: build(subcommand, arguments, starts=True))


def started(make: Callable[[], Any]) -> int:
    """Starts the run that a function builds; says which rank was lost where another one fails for it."""
    from plugins.cli.runs import crowded_cores, lost_ranks

    note = crowded_cores.share_cores()
    try:
        run = make()
        if note and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"# {note}", file=sys.stderr)
        return _started(run)
    except SystemExit as error:
        # Of a technique that called sys.exit; signals reach all ranks.
        if type(error) is SystemExit and not isinstance(error.__context__, KeyboardInterrupt):
            lost_ranks.explain_lost_rank([error])
        raise
    except Exception as error:
        if message := lost_ranks.explain_lost_rank(list(chain(error))):
            raise lost_ranks.LostRankError(message) from error
        raise
    finally:
        lost_ranks.stop_watching()


def _started(cli: Any) -> int:
    from lightning.pytorch.accelerators import CPUAccelerator

    from plugins.cli.configuration.mistakes import explain_lightning_error
    from plugins.cli.runs.kept_memory import keep_memory

    limited = any(getattr(each, "memory_limit", None) for each in cli.trainer.callbacks)
    if isinstance(cli.trainer.accelerator, CPUAccelerator) and not limited:
        keep_memory()
    try:
        cli.start()
    except Exception as error:
        if message := explain_lightning_error(error):
            raise ConfigError(message) from error
        raise
    return 0


def build(subcommand: str, arguments: list[str], starts: bool = False, offline: bool = False) -> Any:
    """Parses, checks and builds a run; returns the `plugins.cli.runs.built_run.BuiltRun` that can start it.

    Args:
        subcommand: fit, validate, test or predict.
        arguments: The command line after it.
        starts: Whether the run will be started, and its folder is made.
        offline: Whether the run is checked for other machines: devices and launcher of this one are ignored.
    """
    from plugins.cli.configuration.request import prepare
    from plugins.cli.runs import restarts

    with _collector_paused():
        request = prepare(arguments, restarts.job(arguments) if starts and subcommand == "fit" else None)
        request.offline = offline
        quieten()
        from plugins.cli.runs.built_run import BuiltRun

    return BuiltRun(subcommand, request, starts)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector while modules are imported: it would take a fifth of that time.

    Objects made by importing torch and Lightning live as long as the process: `gc.freeze` excludes them from later
    collections, in training too.
    """
    enabled, first = gc.isenabled(), "lightning" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first and "lightning" in sys.modules:
            gc.freeze()
            if tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
                atexit.register(
                    gc.unfreeze
                )  # its C++ libraries report what is not collected at exit as leaks
        if enabled:
            gc.enable()


def quieten() -> None:
    """Silences hints of Lightning that do not apply here: data loaders and paths are our own."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*sync_dist=True.*",  # figures are sums over all ranks already
    ):
        warnings.filterwarnings("ignore", message)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("default", ".* is deprecated and goes with core API", DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
