"""fit, validate, test and predict: LightningCLI on composed configs, with preflight and one run folder."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from core.configuration.request import prepare
from core.errors import ConfigError
from core.runs import restarts
from core.technique import technique

_SOURCE = "LightningCLI of lightning 2.6, composed configs and preflight on top"


@technique(paper=_SOURCE)
def fit(arguments: list[str]) -> int:
    """Trains a network: --config NAME_OR_FILE (several compose), --ckpt_path last resumes."""
    return _run("fit", arguments)


@technique(paper=_SOURCE)
def validate(arguments: list[str]) -> int:
    """Computes loss and perplexity of a checkpoint on the validation data."""
    return _run("validate", arguments)


@technique(paper=_SOURCE)
def test(arguments: list[str]) -> int:
    """Computes loss and perplexity of a checkpoint on the test data."""
    return _run("test", arguments)


@technique(paper=_SOURCE)
def predict(arguments: list[str]) -> int:
    """Writes the log-probability of every label token to predictions.safetensors in the run folder."""
    return _run("predict", arguments)


def _run(subcommand: str, arguments: list[str]) -> int:
    cli = build(subcommand, arguments, starts=True)
    from core.configuration.mistakes import told_by_lightning

    try:
        cli.start()
    except Exception as error:
        if told := told_by_lightning(error):
            raise ConfigError(told) from error
        raise
    return 0


def build(subcommand: str, arguments: list[str], starts: bool = False, elsewhere: bool = False) -> Any:
    """Parses, checks and instantiates a run; returns the `core.runs.lightning_cli.Cli` that can start it.

    Args:
        subcommand: fit, validate, test or predict.
        arguments: The command line after it.
        starts: Whether the run will be started, and its folder is made.
        elsewhere: Whether it is checked for machines that are not here: neither their devices nor who launches it.
    """
    request = prepare(arguments, restarts.job(arguments) if starts and subcommand == "fit" else None)
    request.elsewhere = elsewhere
    _quieten()
    from core.runs.lightning_cli import Cli

    return Cli(subcommand, request, starts)


def _quieten() -> None:
    """Silences hints of Lightning's that do not apply here: the loaders and paths are ours."""
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
        warnings.filterwarnings("ignore", category=FutureWarning)
