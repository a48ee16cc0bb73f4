"""Run folders as `watch` shows them: what a run logged, sampled and found, read within limits and never written."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from core.errors import ConfigError
from plugins.cli.configuration.yaml_texts import parse_yaml
from plugins.cli.runs.claims import CLAIM
from plugins.commands.run_folders import is_run
from plugins.commands.watch_table import Table, group_of, plain_number
from toolkit.bounded import open_inside, parse_json, read_error
from toolkit.holders import Holder, alive

MOST_RUNS = 64
TAIL_BYTES = 1 << 16
"""How much of the end of a text is shown."""

MOST_CONFIG_BYTES = 1 << 19
SHOWN = ("train/loss", "val/loss", "throughput/tokens_per_second", "throughput/peak_memory_gib", "heartbeat/slowest_rank",
         "heartbeat/slowest_over_median", "spike_rollback/rollbacks")  # fmt: skip
"""Figures whose newest value is shown beside a run's name."""


NAME = r"[A-Za-z0-9][\w.-]{0,99}"
PICTURE = re.compile(rf"({NAME}/){{0,2}}{NAME}\.png", re.ASCII)
REPORT = re.compile(rf"evaluation/report\.md|spike_report/{NAME}\.md", re.ASCII)
"""What names of pictures and reports look like, below the run folder."""

MOST_PICTURES, MOST_PICTURE_BYTES = 64, 8 << 20
MOST_REPORTS = 4
MOST_ENTRIES = 2000
"""Entries of a folder that are looked at."""

PNG = b"\x89PNG\r\n\x1a\n"


class WatchedRun:
    """One run folder.

    Args:
        root: A folder that the user named.
        below: The run folder in it, "name/"; empty: the folder itself.
        name: How it is called.
    """

    def __init__(self, root: Path, below: str, name: str) -> None:
        self.root, self.below, self.name = root, below, name
        self.table = Table(lambda: self._open("metrics.csv"))

    def _open(self, name: str) -> IO[bytes]:
        return open_inside(self.root, self.below + name)

    def _end_of(self, name: str, most: int = TAIL_BYTES) -> str:
        """Returns the end of a text, from the beginning of a line; empty where there is none that can be read."""
        try:
            with self._open(name) as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(size - most, 0))
                text = stream.read(most).decode(errors="replace")
        except (OSError, ValueError):  # not there, or no file inside of the folder
            return ""
        return text.partition("\n")[2] if size > most else text

    def summary(self) -> dict[str, Any]:
        """Reads what is new; returns how far the run is, and which figures it has."""
        note = ""
        try:
            self.table.look()
        except FileNotFoundError:
            note = "no figures yet"
        except (OSError, ValueError) as error:
            note = f"metrics.csv: {read_error(error)}"
        newest = self.table.newest()
        groups: dict[str, int] = {}
        for name in self.table.names():
            groups[group_of(name)] = groups.get(group_of(name), 0) + 1
        trainer = self._trainer()
        return {
            "name": self.name,
            "folder": str(self.root / self.below),
            "state": self._state(),
            "age": self._age(),
            "step": plain_number(newest.get("step")),
            "max_steps": plain_number(trainer.get("max_steps")),
            "newest": {name: _shown(newest[name]) for name in SHOWN if name in newest},
            "groups": groups,
            "version": self.table.changes,
            "note": note or self.table.note,
            "stalls": self._stalls(),
            "findings": len(self._findings()),
        }

    def figures(self, groups: Sequence[str]) -> dict[str, Any]:
        """Returns the curves of some groups."""
        found = {name: self.table.curve(name) for name in self.table.names() if group_of(name) in groups}
        return {name: curve for name, curve in found.items() if curve}

    def texts(self) -> dict[str, Any]:
        """Returns the newest samples, the findings of the doctor, rollbacks and the table of techniques."""
        samples = re.split(r"(?m)^(?==== step )", self._end_of("samples.txt"))
        return {
            "samples": [text.strip() for text in samples if text.startswith("=== step ")][-8:][::-1],
            "findings": self._findings(),
            "rollbacks": _records([self._end_of("spike_rollbacks.json")]),
            "techniques": self._end_of("techniques.txt"),
            "reports": [{"name": name, "text": self._begin_of(name)} for name in self._reports()],
            "pictures": [
                {"name": name, "version": str(changed)} for name, changed in self._pictures().items()
            ],
        }

    def picture(self, name: str) -> bytes | None:
        """Returns a picture that :meth:`texts` names; None if there is no such PNG of at most 8 MiB."""
        if name not in self._pictures():
            return None
        try:
            with self._open(name) as stream:
                content = stream.read(MOST_PICTURE_BYTES + 1)
        except (OSError, ValueError):  # removed just now, or no file inside of the folder
            return None
        return content if content.startswith(PNG) and len(content) <= MOST_PICTURE_BYTES else None

    def _begin_of(self, name: str) -> str:
        try:
            with self._open(name) as stream:
                return stream.read(TAIL_BYTES).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def _reports(self) -> list[str]:
        """Returns the report of the evaluations, and the newest reports on spikes."""
        spikes = sorted(self._files("spike_report/", REPORT), reverse=True)[:MOST_REPORTS]
        return [*self._files("evaluation/", REPORT), *spikes]

    def _pictures(self) -> dict[str, int]:
        """Returns name -> time of change of the pictures: of the folder, of those in it, and of the newest evaluation."""
        folders = ["", *self._folders("")]
        steps = [
            name for name in self._folders("evaluation/") if re.fullmatch(r"evaluation/step-\d{1,12}/", name)
        ]
        found: dict[str, int] = {}
        for folder in [*folders, *sorted(steps)[-1:]]:
            found |= self._files(folder, PICTURE)
        return dict(sorted(found.items())[:MOST_PICTURES])

    def _files(self, folder: str, pattern: re.Pattern[str]) -> dict[str, int]:
        entries = self._entries(folder)
        return {
            folder + one.name: one.stat(follow_symlinks=False).st_mtime_ns
            for one in entries
            if pattern.fullmatch(folder + one.name) and one.is_file(follow_symlinks=False)
        }

    def _folders(self, folder: str) -> list[str]:
        entries = self._entries(folder)
        names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        return [f"{folder}{name}/" for name in sorted(names) if re.fullmatch(NAME, name, re.ASCII)]

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Returns the first entries of a folder of the run; none of a link."""
        path = self.root / self.below / folder
        try:
            if folder and path.is_symlink():
                return []
            with os.scandir(path) as entries:
                return list(islice(entries, MOST_ENTRIES))
        except OSError:  # it is not there, or was removed just now
            return []

    def _findings(self) -> list[dict[str, Any]]:
        return _records(self._end_of("doctor/findings.jsonl").splitlines())

    def _trainer(self) -> dict[str, Any]:
        try:
            with self._open("config.yaml") as stream:
                values = parse_yaml(stream.read(MOST_CONFIG_BYTES).decode(), "config.yaml")[0]
        except (OSError, ValueError, ConfigError):  # not there, or not what a run writes: it is shown without
            return {}
        trainer = values.get("trainer") if isinstance(values, dict) else None
        return trainer if isinstance(trainer, dict) else {}

    def _age(self) -> float | None:
        try:
            with self._open("metrics.csv") as stream:
                return round(time.time() - os.fstat(stream.fileno()).st_mtime, 1)
        except (OSError, ValueError):
            return None

    def _state(self) -> str:
        """Returns whether the run's process lives, as its claim on the folder says."""
        text = self._end_of(CLAIM)
        if not text:
            return "ended"
        try:
            claim = parse_json(text.encode())
            holder = Holder(**claim)
        except (ValueError, TypeError):
            return "unknown"
        if type(holder.process) is not int or not isinstance(holder.host, str):
            return "unknown"
        lives = alive(holder)
        return "unknown" if lives is None else "running" if lives else "stopped"

    def _stalls(self) -> list[str]:
        """Returns the files with stacks that Heartbeat wrote when a step did not end."""
        found = []
        try:
            with os.scandir(self.root / self.below) as entries:
                for entry in entries:
                    if re.fullmatch(r"stacks\.rank\d{1,6}\.txt", entry.name) and entry.is_file(
                        follow_symlinks=False
                    ):
                        found += [entry.name] if entry.stat(follow_symlinks=False).st_size else []
        except OSError:  # the folder is gone: the note says so
            return []
        return sorted(found)[:16]


class Runs:
    """The runs of some folders: run folders, and folders of run folders, in which runs may appear later.

    Args:
        names: What the user named.

    Raises:
        ConfigError: If one is no folder.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.roots = [Path(name).expanduser() for name in names]
        for root in self.roots:
            if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
                raise ConfigError(
                    f"There is no folder {root} that can be read. Give run folders, or a folder with run folders."
                )
        self._runs: dict[tuple[Path, str], WatchedRun] = {}

    def all(self) -> list[WatchedRun]:
        """Returns all runs, in the order in which they were found; looks for new ones."""
        for root in self.roots:
            for below in ("",) if is_run(root) else _runs_in(root):
                if len(self._runs) < MOST_RUNS and (root, below) not in self._runs:
                    name = below.rstrip("/") or root.resolve().name
                    taken = {run.name for run in self._runs.values()}
                    name = str(root / below) if name in taken else name
                    self._runs[root, below] = WatchedRun(root, below, name)
        return list(self._runs.values())


def _runs_in(root: Path) -> list[str]:
    """Returns the run folders in a folder, "name/", oldest first; links are left out."""
    try:
        with os.scandir(root) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
            runs = [entry for entry in found if is_run(Path(entry.path))]
            return [f"{entry.name}/" for entry in sorted(runs, key=lambda one: one.stat().st_ctime_ns)]
    except OSError:  # the folder or a run was removed just now: the next look sees what is left
        return []


def _records(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the newest JSON objects of some lines, with texts and numbers alone."""
    found = []
    for line in lines:
        try:
            value = parse_json(line.encode()) if line.strip() else []
        except ValueError:  # cut off, or not JSON
            continue
        found += value if isinstance(value, list) else [value]
    plain = [one for one in found if isinstance(one, dict)][-100:]
    return [{key: _text(value) for key, value in one.items()} for one in plain]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)[:2000]


def _shown(value: float) -> float | str:
    return value if plain_number(value) is not None else str(value)
