"""Runs of the fault kit: configurations composed as on the command line, built and trained in this process."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer, seed_everything

from core import catalog
from core.language_module import LanguageModule
from plugins.cli.configuration.config_files import Layer, merge_layers
from plugins.cli.preflight import ordered
from plugins.cli.runs.no_profiler import NoProfiler

FACTORIES = ("network", "optimizer", "lr_scheduler")
"""Arguments of the model that are called later."""


def composed(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns configurations merged from left to right, as `--config A --config B` does."""
    return merge_layers([Layer(deepcopy(dict(layer)), {}) for layer in layers]).values


def train(values: Mapping[str, Any], folder: Path) -> Trainer:
    """Trains a configuration in a run folder, and returns the trainer.

    The command line would take as long to check a configuration as these runs take to train: classes are built here as
    they are named. An error of the run is raised.
    """
    values = composed(values)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    seed_everything(values["seed_everything"], workers=True, verbose=False)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        model = {key: _built(value, key in FACTORIES, folder) for key, value in values["model"].items()}
        options = {key: _built(value, False, folder) for key, value in values["trainer"].items()}
        options["callbacks"] = ordered(options["callbacks"])
        trainer = Trainer(**options, default_root_dir=folder, profiler=NoProfiler())
        trainer.fit(LanguageModule(**model), datamodule=_built(values["data"], False, folder))
    return trainer


def _built(value: Any, later: bool, folder: Path) -> Any:
    if isinstance(value, list):
        return [_built(item, False, folder) for item in value]
    if not isinstance(value, Mapping) or "class_path" not in value:
        return value
    name = str(value["class_path"])
    if "." in name:
        module, _, attribute = name.rpartition(".")
        kind = getattr(import_module(module), attribute)
    else:
        kind = catalog.find(name).load()
    factories = ("reader",)
    arguments = {
        key: _built(item, key in factories, folder) for key, item in (value.get("init_args") or {}).items()
    }
    if name.endswith("MetricsCSV"):
        arguments["save_dir"] = str(folder)
    return partial(kind, **arguments) if later else kind(**arguments)
