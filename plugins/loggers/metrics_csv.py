"""One `metrics.csv` for the full history of a run, also if it was stopped and resumed."""

from __future__ import annotations

import csv
import errno
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core import durable
from core.errors import ConfigError
from core.technique import technique
from toolkit import local_paths
from toolkit.bounded import MOST_TABLE_BYTES

EVALUATION = ("val", "test", "epoch")
"""Prefixes of metrics that do not come from a training step."""


@technique(paper="RFC 4180; a wide table, as pandas.read_csv takes it", maturity="stable")
class MetricsCSV(Logger):
    """Writes every logged metric to `metrics.csv`: one row per step, one column per metric.

    Training and validation metrics of one step share its row. A metric that was not logged in a step is left empty.
    Names are those that are logged, as in TensorBoard: losses are in nats per token, `train/tokens` counts label
    tokens, other units are part of the name (`throughput/step_time_ms`). `step` is the number of optimizer steps
    done. Numbers are written so that they read back exactly.

    Each call writes to the operating system before it returns, in one write: if the process is killed, at most the
    row being written is lost. A new column rewrites the file atomically.

    A resumed run continues the same file. Rows that the stopped run wrote after its last checkpoint are dropped when
    the first training metrics are logged. Evaluation metrics wait for training metrics, so that `validate` and
    `test` do not change the file. If training goes back to an earlier step (`SpikeRollback`), later rows are dropped.

    Args:
        save_dir: The folder of `metrics.csv`; the run folder by default.

    Raises:
        ConfigError: If an existing `metrics.csv` is not text or has no `step` column, or if `save_dir` is a URL.

    Example:
        trainer:
          logger+:
            - class_path: MetricsCSV
    """

    def __init__(self, save_dir: str = "${run_folder}") -> None:
        super().__init__()
        self._save_dir = local_paths.require_local_path(save_dir, "MetricsCSV: save_dir")
        self._reset()

    def _reset(self) -> None:
        self._file: io.FileIO | None = None
        self._columns: list[str] = []
        self._row: dict[str, str] = {}  # the newest row, which is the last of the file
        self._row_start = self._size = 0  # bytes: start of the newest row, end of the file
        self._waiting: list[tuple[int, dict[str, float]]] = []

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._save_dir) / "metrics.csv"

    @property
    def save_dir(self) -> str:
        """The folder of the file."""
        return self._save_dir

    @property
    def name(self) -> str:
        """Empty: the logger makes no folder of its own."""
        return ""

    @property
    def version(self) -> str:
        """Empty: there is one file per run."""
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run folder contains the configuration."""

    @rank_zero_only
    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Reads an existing file, so that a damaged one is reported before training starts."""
        _read(self.path)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds metrics to the row of a step.

        Args:
            metrics: Name -> number.
            step: The step; None: the step of the newest row.
        """
        if step is None:
            step = int(self._row.get("step", 0))
        if self._file is not None:
            self._add(step, metrics)
            return
        self._waiting.append((step, metrics))
        if all(name.startswith(EVALUATION) for name in metrics):
            return
        self._open(first_step=min(step for step, _ in self._waiting))
        for step, metrics in self._waiting:
            self._add(step, metrics)
        self._waiting.clear()

    @rank_zero_only
    def go_back(self, step: int) -> None:
        """Drops the rows after a step that training has gone back to."""
        self._waiting = [(at, metrics) for at, metrics in self._waiting if at <= step]
        if self._file is not None:
            rows = [row for row in _read(self.path)[1] if int(row["step"]) <= step]
            self._rewrite(self._columns, rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the file; a later `fit` in the same process opens it again."""
        if self._file is not None:
            self._file.close()
        self._reset()

    def _open(self, first_step: int) -> None:
        columns, rows = _read(self.path)
        rows = [row for row in rows if int(row["step"]) <= first_step]
        self._rewrite(columns or ["step"], rows)

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replaces the file; its last row becomes the newest."""
        if self._file is not None:
            self._file.close()
            self._file = None
        text = _line(columns) + "".join(_line([row.get(name, "") for name in columns]) for row in rows)
        durable.write(self.path, text)
        self._columns, self._row = columns, rows[-1] if rows else {}
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - open until finalize
        newest = _line([self._row.get(name, "") for name in columns]) if rows else ""
        self._size = os.fstat(self._file.fileno()).st_size
        self._row_start = self._size - len(newest.encode())

    def _add(self, step: int, metrics: dict[str, float]) -> None:
        assert self._file is not None
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._rewrite(self._columns + new, _read(self.path)[1])
        if self._row.get("step") != str(step):
            self._row = {"step": str(step)}
            self._row_start = self._size
        self._row.update({name: str(value) for name, value in metrics.items()})
        line = _line([self._row.get(name, "") for name in self._columns]).encode()
        end = self._row_start + len(line)
        line += b"\n" * (self._size - end)  # overwrites the rest of a longer row
        try:
            written = os.pwrite(self._file.fileno(), line, self._row_start)
            if written < len(line):  # a row without a line end is ignored when the file is read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if end < self._size:
                os.ftruncate(self._file.fileno(), end)
        except OSError as error:
            error.filename = str(self.path)
            raise
        self._size = end


def _line(values: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the columns and the rows of a file, without an unfinished last line."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file, so it was not written by MetricsCSV.\nMove it away.")
    if path.exists() and path.stat().st_size > MOST_TABLE_BYTES:
        raise ConfigError(
            f"{path} has more than {MOST_TABLE_BYTES:,} bytes, too many to continue it.\nMove it away."
        )
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        if not lines:
            return [], []
        columns = next(csv.reader(lines[:1]))
        rows = [row for row in csv.DictReader(lines) if _is_step(row.get("step"))]
    except (UnicodeDecodeError, csv.Error, StopIteration) as error:
        raise ConfigError(f"{path} is not a table of text ({error}).\nMove it away.") from error
    if "step" not in columns:
        raise ConfigError(f"{path} has no `step` column, so it was not written by MetricsCSV.\nMove it away.")
    return columns, rows


def _is_step(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdecimal() and len(text) < 19
