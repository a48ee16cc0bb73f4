"""What the loggers of experiment trackers have in common: growing steps, attempts, resuming, files of the run folder."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from core.errors import ConfigError
from toolkit import local_paths
from toolkit.bounded import parse_json, read_error, read_inside
from toolkit.checkpoint_names import ABANDONED, step_named

Checkpoints = Literal["reference", "copy"] | None
"""Whether a tracker is told of checkpoints: by their path, as a copy, or not."""

EVALUATION = ("val", "test", "epoch")
"""Prefixes of metrics that do not come from a training step."""

MOST_PICTURES = 64
"""Limit of pictures of one run."""


class Tracker(Logger, ABC):
    """A logger of an experiment tracker.

    Trackers need steps that grow. The step that they get is the number of optimizer steps, plus those that were discarded:
    after a rollback, or a resume from an earlier step, the next one follows the last that was sent. Each row also has
    `optimizer_step` and `attempt`, which rises by 1 each time that training has gone back.

    All figures of a step are sent in one row, once the next step begins; a process that is killed loses at most this
    one. Rows that cannot be sent are kept and sent with the next.

    Args:
        save_dir: The run folder. Its config.yaml and techniques.txt are sent at the start, and its pictures (.png) after
            validations and at the end. The tracker's run is noted in it, so that a resumed run continues it.
        checkpoints: What is sent of the checkpoints in `checkpoints` of the run folder.
    """

    def __init__(self, save_dir: str, checkpoints: Checkpoints) -> None:
        super().__init__()
        self._folder = Path(local_paths.require_local_path(save_dir, f"{type(self).__name__}: save_dir"))
        self._checkpoints = checkpoints
        self._reset()

    def _reset(self) -> None:
        self._run: Any = None
        self._note: dict[str, Any] = {}
        self._row: dict[str, float] = {}
        self._rows: list[tuple[int, dict[str, float]]] = []  # complete rows that are not sent yet
        self._sent: dict[Path, int] = {}  # file -> time of its change, as it was sent
        self._resumed = self._went_back = False

    # -- what a tracker does --------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run_id: str | None, name: str) -> tuple[str, Any]:
        """Returns id and object of the tracker's run: that with an id, or a new one."""

    @abstractmethod
    def _configure(self, config: Mapping[str, Any]) -> None:
        """Sends the configuration, flat: dotted key -> value."""

    @abstractmethod
    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends figures of a step; raises an OSError if that is not possible now."""

    @abstractmethod
    def _send_file(self, path: Path) -> None:
        """Sends a text or a picture of the run folder."""

    @abstractmethod
    def _send_checkpoint(self, path: Path, step: int, copy: bool) -> None:
        """Sends a checkpoint, a file or a folder, or its path."""

    @abstractmethod
    def _end(self, failed: bool) -> None:
        """Ends the tracker's run; it may be continued."""

    # -- what Lightning asks --------------------------------------------------------------------------

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @property
    def name(self) -> str:
        """Empty: the logger makes no folder of its own."""
        return ""

    @property
    def version(self) -> str:
        """Empty: a run has one run of the tracker."""
        return ""

    @property
    def run(self) -> Any:
        """The tracker's own object of the run, on rank 0 while training; else None."""
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Sends values that a run from Python has besides its configuration."""
        self._start()
        self._configure(dict(flat(vars(params) if isinstance(params, Namespace) else params)))

    @rank_zero_only
    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Begins the tracker's run, so that a tracker that cannot be reached is reported before training starts."""
        self._start()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds figures to the row of a step.

        Args:
            metrics: Name -> number.
            step: Optimizer steps done; None: those of the newest row.
        """
        self._start()
        evaluates = all(name.startswith(EVALUATION) for name in metrics)
        self._enter(max(self._note["step"], 0) if step is None else step, evaluates)
        self._row.update({name: float(value) for name, value in metrics.items()})

    @rank_zero_only
    def go_back(self, step: int) -> None:
        """Begins the next attempt: training goes back to a step."""
        self._start()
        self._flush()
        self._note["attempt"] += 1
        self._went_back = True
        self._write_note()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sends what is left; a later `fit` in the same process continues the same run."""
        if self._run is None:
            return
        self._flush()
        self._send_files()
        if self._rows:
            rank_zero_warn(f"{type(self).__name__}: {len(self._rows)} rows of figures could not be sent.")
        self._end(failed=status not in ("success", "finished"))
        self._reset()

    # -- rows -----------------------------------------------------------------------------------------

    def _enter(self, step: int, evaluates: bool) -> None:
        """Makes the row of a step the newest; the next attempt begins if that is no later one."""
        note = self._note
        last, again = note["step"], self._went_back or (self._resumed and not evaluates)
        self._resumed = self._resumed and evaluates
        if step == last and not again:
            return
        self._flush()
        if step <= last:
            note["attempt"] += not self._went_back
            note["ahead"] += last - step + 1
        note["step"], self._went_back = step, False
        self._write_note()

    def _flush(self) -> None:
        """Completes the newest row, and sends all that were not sent."""
        if not self._row:
            return
        note = self._note
        row = {**self._row, "optimizer_step": float(note["step"]), "attempt": float(note["attempt"])}
        self._rows.append((self._newest_step, row))
        self._row = {}
        try:
            while self._rows:
                self._send(*self._rows[0])
                del self._rows[0]
        except OSError as error:
            rank_zero_warn(f"{type(self).__name__}: {len(self._rows)} rows will be sent later: {error}")
        if any(name.startswith(("val/", "eval/", "checkpoint/")) for name in row):
            self._send_files()

    @property
    def _newest_step(self) -> int:
        """The tracker's step of the newest row, which pictures belong to."""
        return max(self._note["step"], 0) + int(self._note["ahead"])

    # -- the tracker's run and the run folder ---------------------------------------------------------

    @property
    def _note_path(self) -> Path:
        return self._folder / "trackers" / f"{type(self).__name__}.json"

    def _start(self) -> None:
        """Begins the tracker's run, or continues that of the run folder."""
        if self._run is not None:
            return
        known = self._read_note()
        name = self._folder.resolve().name or "run"
        try:
            run_id, self._run = self._begin(known.get("run"), name)
        except OSError as error:
            raise ConfigError(f"{type(self).__name__}: no run can be begun: {str(error)[:300]}") from error
        self._resumed = bool(known)
        self._note = {"step": -1, "ahead": 0, "attempt": 1, **known, "run": run_id}
        self._write_note()
        if config := self._read("config.yaml"):
            self._configure(dict(flat(yaml.safe_load(config))) | self._techniques())
        for file in ("config.yaml", "techniques.txt"):
            if (self._folder / file).is_file():
                self._send_file(self._folder / file)

    def _read(self, name: str) -> str:
        try:
            return read_inside(self._folder, name).decode()
        except FileNotFoundError:
            return ""

    def _read_note(self) -> dict[str, Any]:
        try:
            note = parse_json(read_inside(self._folder, f"trackers/{self._note_path.name}"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._note_path} cannot be read: {read_error(error)}.\nRemove it: the run then gets a new run of the tracker."
            ) from error
        numbers = ("step", "ahead", "attempt")
        if not isinstance(note, dict) or not all(type(note.get(key)) is int for key in numbers):
            note = {}
        if not isinstance(note.get("run"), str) or not re.fullmatch(r"[\w.-]{1,200}", note["run"]):
            raise ConfigError(f"{self._note_path} was not written by {type(self).__name__}.\nRemove it.")
        return {key: note[key] for key in (*numbers, "run")}

    def _write_note(self) -> None:
        """Replaces the note, as often as rows begin: whole after the process was killed, but not flushed to the disk."""
        self._note_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._note_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._note), encoding="utf-8")
        os.replace(temporary, self._note_path)

    def _techniques(self) -> dict[str, str]:
        """Returns the selected techniques with package and version, from the table in the run folder."""
        rows = [re.split(r" {2,}", line) for line in self._read("techniques.txt").splitlines()[1:]]
        return {f"technique.{row[0]}": f"{row[2]} {row[3]}" for row in rows if len(row) == 5}

    def _send_files(self) -> None:
        """Sends pictures and checkpoints that are new or have changed."""
        for path in self._changed(self._pictures()):
            self._try(self._send_file, path)
        if self._checkpoints is not None:
            names = sorted((self._folder / "checkpoints").glob("*.ckpt"))
            kept = [path for path in names if step_named(path) is not None and ABANDONED not in path.name]
            for path in self._changed(kept):
                self._try(self._send_checkpoint, path, step_named(path) or 0, self._checkpoints == "copy")

    def _pictures(self) -> list[Path]:
        """Returns the pictures of the run folder, and of evaluations those of the newest step."""
        steps = sorted(self._folder.glob("evaluation/step-*/*.png"))
        newest = [path for path in steps if path.parent == steps[-1].parent]
        return sorted([*self._folder.glob("*.png"), *self._folder.glob("*/*.png"), *newest])[:MOST_PICTURES]

    def _artifact(self, package: Any, name: str, path: Path, step: int, copy: bool) -> Any:
        """Returns a checkpoint, or its path, as an artifact of W&B, or of Trackio, which takes the same calls."""
        artifact = package.Artifact(name, "model", metadata={"step": step})
        if not copy:
            artifact.add_reference(path.resolve().as_uri(), checksum=False)
        elif path.is_dir():
            artifact.add_dir(str(path), path.name)
        else:
            artifact.add_file(str(path), path.name)
        return artifact

    def _picture_name(self, path: Path) -> str:
        """Returns what a picture is called in curves over steps: without ending, and without the step itself."""
        name = path.relative_to(self._folder).with_suffix("").as_posix()
        return re.sub(r"/step-\d+/", "/", name)

    def _changed(self, paths: Iterable[Path]) -> Iterator[Path]:
        for path in paths:
            try:
                time_ns = path.stat().st_mtime_ns
            except FileNotFoundError:  # removed meanwhile, as an old checkpoint
                continue
            if self._sent.get(path) != time_ns and not path.is_symlink():
                yield path
                self._sent[path] = time_ns

    def _try(self, send: Callable[..., None], path: Path, *arguments: Any) -> None:
        try:
            send(path, *arguments)
        except OSError as error:  # the run continues
            rank_zero_warn(f"{type(self).__name__}: {path} was not sent: {error}")


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of what a configuration nests; a class of a list by its name."""
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        yield f"{key}.class_path", value["class_path"]
        yield from flat(value.get("init_args") or {}, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from flat(item, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for number, item in enumerate(value):
            path = item.get("class_path") if isinstance(item, Mapping) else None
            name = path.rpartition(".")[2] if isinstance(path, str) else number
            yield from flat(item, f"{key}.{name}")
    else:
        yield key, value
