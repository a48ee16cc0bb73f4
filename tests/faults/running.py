"""Runs of the fault kit: configurations composed as on the command line, built and trained in this process or on ranks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from conformance.runs import free_port, on_ranks
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


class Interruption(Exception):
    """What ends an interrupted run; its argument is the checkpoint."""


class Interrupted(Callback):
    """Saves a checkpoint after a step and ends the run with an error, unless it is resumed already.

    Args:
        step: The step.
        path: The checkpoint.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and not trainer.ckpt_path:
            trainer.save_checkpoint(self.path)
            raise Interruption(self.path)


def train(values: Mapping[str, Any], folder: Path) -> Trainer | None:
    """Trains a configuration in a run folder, and returns the trainer; None: of several ranks, which are processes.

    The command line would take as long to check a configuration as these runs take to train: classes are built here as
    they are named. An interrupted run is resumed. An error of the run is raised.
    """
    values = composed(values)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    if (ranks := values["trainer"]["devices"]) == 1:
        return _train(values, folder)
    on_ranks(_train_rank, ranks, ranks, free_port(), values, folder)
    return None


def _train_rank(rank: int, ranks: int, port: int, values: Mapping[str, Any], folder: Path) -> None:
    """Trains in a process of its own, which finds in its environment what torchrun sets."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "faults"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    setattr(rank_zero_only, "rank", rank)  # noqa: B010 - read from the environment at import, which is over
    _train(values, folder)


def _train(values: Mapping[str, Any], folder: Path) -> Trainer:
    try:
        return _fit(values, folder, None)
    except Interruption as interruption:
        return _fit(values, folder, str(interruption))


def _fit(values: Mapping[str, Any], folder: Path, checkpoint: str | None) -> Trainer:
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
        data = _built(values["data"], False, folder)
        trainer.fit(LanguageModule(**model), datamodule=data, ckpt_path=checkpoint)
    return trainer


def _built(value: Any, later: bool, folder: Path) -> Any:
    if isinstance(value, list):
        return [_built(item, False, folder) for item in value]
    if isinstance(value, str):
        return value.replace("${run_folder}", str(folder))
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
