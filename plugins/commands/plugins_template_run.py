"""What `plugins new` starts a callback, a command or a logger from, each with its test.

Each is a small technique that works, to be changed into another. `TechniqueName`, `technique_name` and
`technique-name` stand for its name.
"""

CALLBACK = '''
"""Ends a run that has gone wrong."""

from __future__ import annotations

from typing import Any

from core.errors import ConfigError
from core.technique import technique
from lightning.pytorch import Callback, LightningModule, Trainer


@technique(paper="own work", api="API_RANGE")
class TechniqueName(Callback):
    """Stops the run when the training loss is above `limit`, or is not a number.

    Args:
        limit: The highest loss to go on with, in nats per token.

    Raises:
        ConfigError: If `limit` <= 0.

    Example:
        trainer:
          callbacks+:
            - class_path: TechniqueName
              init_args: {limit: 20.0}
    """

    def __init__(self, limit: float = 20.0) -> None:
        if limit <= 0:
            raise ConfigError(f"TechniqueName takes limit > 0 (nats per token), not {limit}.")
        self.limit = limit

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the loss where it is logged; in any other step that would be a wait for the device."""
        if pl_module.logging_step and not float(trainer.callback_metrics["train/loss"]) <= self.limit:
            trainer.should_stop = True
'''

CALLBACK_TEST = '''
"""What TechniqueName computes."""

from types import SimpleNamespace

import pytest
import torch
from core.errors import ConfigError

from leyden_technique_name.technique_name import TechniqueName


@pytest.mark.parametrize(
    ("loss", "logged", "stops"),
    [(20.0, True, False), (20.5, True, True), (float("nan"), True, True), (20.5, False, False)],
)
def test_it_stops_where_a_logged_loss_is_above_the_limit(loss, logged, stops):
    trainer = SimpleNamespace(callback_metrics={"train/loss": torch.tensor(loss)}, should_stop=False)
    module = SimpleNamespace(logging_step=logged)
    TechniqueName(limit=20.0).on_train_batch_end(trainer, module, None, {}, 0)
    assert trainer.should_stop is stops


def test_a_limit_that_cannot_be_met_is_refused():
    with pytest.raises(ConfigError, match="limit > 0"):
        TechniqueName(limit=0.0)
'''

COMMAND = '''
"""The command `technique_name`."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from core.errors import ConfigError
from core.technique import technique


@technique(paper="own work", api="API_RANGE")
def technique_name(arguments: list[str]) -> int:
    """Prints the step of a run that had the lowest validation loss.

    Example:
        python -m core technique_name runs/quickstart
    """
    parser = argparse.ArgumentParser(prog="python -m core technique_name")
    parser.add_argument("run_dir", type=Path, help="a run folder with a metrics.csv")
    path = parser.parse_args(arguments).run_dir / "metrics.csv"
    if not path.is_file():
        raise ConfigError(f"There is no {path}. Is that a run folder? MetricsCSV writes the file.")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    if not rows:
        raise ConfigError(f"{path} has no validation loss: set --trainer.val_check_interval.")
    best = min(rows, key=lambda row: float(row["val/loss"]))
    print(f"step {best['step']}: {float(best['val/loss']):.4f} nats per token")
    return 0
'''

COMMAND_TEST = '''
"""What the command prints."""

import pytest
from core.__main__ import main


def test_the_lowest_loss_is_printed(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("step,val/loss\\n10,3.5\\n15,\\n20,2.25\\n30,2.5\\n")
    assert main(["technique_name", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 20: 2.2500 nats per token\\n"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "There is no"), ("step,val/loss\\n5,\\n", "no validation")]
)
def test_what_is_missing_is_said(text, message, tmp_path, capsys):
    if text:
        (tmp_path / "metrics.csv").write_text(text)
    assert main(["technique_name", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
'''

LOGGER = '''
"""Metrics as JSON Lines."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from core.technique import technique
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


@technique(paper="JSON Lines, jsonlines.org", api="API_RANGE")
class TechniqueName(Logger):
    """Appends what is logged to `metrics.jsonl`, an object with `step` and the figures at each call.

    A resumed run appends to the same file: of two objects with one step, the later counts.

    Args:
        save_dir: The folder of the file; the run folder by default.

    Example:
        trainer:
          logger+:
            - class_path: TechniqueName
    """

    def __init__(self, save_dir: str = "${run_folder}") -> None:
        super().__init__()
        self._path = Path(save_dir, "metrics.jsonl")

    @property
    def name(self) -> str:
        """Empty: nothing is put below a folder of its own."""
        return ""

    @property
    def version(self) -> str:
        """Empty: a run has one history."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends one line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\\n")

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run folder holds the whole configuration."""
'''

LOGGER_TEST = '''
"""What TechniqueName computes."""

import json

from leyden_technique_name.technique_name import TechniqueName


def test_each_call_appends_a_line_also_after_a_resume(tmp_path):
    TechniqueName(str(tmp_path)).log_metrics({"train/loss": 2.5, "train/lr": 0.1}, step=1)
    TechniqueName(str(tmp_path)).log_metrics({"train/loss": 2.25}, step=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "train/loss": 2.5, "train/lr": 0.1},
        {"step": 2, "train/loss": 2.25},
    ]
'''

TEMPLATES = {
    "callbacks": (CALLBACK, CALLBACK_TEST),
    "commands": (COMMAND, COMMAND_TEST),
    "loggers": (LOGGER, LOGGER_TEST),
}
"""Kind -> the technique's module, and its tests."""
