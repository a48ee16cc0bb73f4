"""Choices between answers on the disk: each is there as soon as it was made, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core import durable
from core.errors import ConfigError
from plugins.commands.prefer_tasks import RESERVED, UNDONE, Task
from toolkit.bounded import parse_json, read_error, read_inside

VOTES, PREFERENCES = "votes.jsonl", "preferences.jsonl"
"""All choices, one a line, in the order in which they were made; records for PreferenceDataModule, made from them."""

Vote = Mapping[str, Any]
"""`task`, `prompt`, `models`, `answers`, `left` (name of the model on the left), and `choice` (a model's name, or one of the above)."""


class Votes:
    """The choices of a folder, of which the last for each task counts. One process at a time writes.

    Args:
        folder: Made where it is missing.

    Raises:
        ConfigError: If it cannot be written, another process writes there, or a line is none of ours.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / VOTES, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"--output {folder}: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"--output {folder} is in use by another `prefer`: end that first.") from error
        try:
            complete = os.pread(self._file, os.fstat(self._file).st_size, 0).rpartition(b"\n")
            os.ftruncate(
                self._file, len(complete[0]) + len(complete[1])
            )  # the rest: a write that was cut off
            self.last = read_votes(folder)
            self._write_preferences()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets other processes write."""
        os.close(self._file)

    def add(self, task: Task, choice: str, left: str) -> None:
        """Stores a choice; returns when it is on the disk.

        Raises:
            OSError: If it cannot be written.
        """
        vote = {
            "task": task.id,
            "prompt": task.prompt,
            "models": list(task.models),
            "answers": list(task.answers),
            "left": left,
            "choice": choice,
        }
        with self._lock:
            line = (json.dumps(vote) + "\n").encode()
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError(28, "No space left on device")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
            self.last.pop(task.id, None)  # the order is that of the last choices
            if choice != UNDONE:
                self.last[task.id] = vote
            self._write_preferences()

    def _write_preferences(self) -> None:
        lines = []
        for vote in self.last.values():
            if vote["choice"] in vote["models"]:
                better = vote["models"].index(vote["choice"])
                record = {"prompt": vote["prompt"], "chosen": vote["answers"][better]}
                record |= {"rejected": vote["answers"][1 - better], "chosen_model": vote["choice"]}
                lines.append(json.dumps(record | {"rejected_model": vote["models"][1 - better]}) + "\n")
        durable.write(self.folder / PREFERENCES, "".join(lines))


def read_votes(folder: Path) -> dict[str, Vote]:
    """Returns the choice that counts for each task, in the order in which they were made.

    Raises:
        ConfigError: If there are none, or a line is none of ours.
    """
    try:
        lines = read_inside(folder, VOTES).split(b"\n")[:-1]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / VOTES}: {read_error(error)}.\nGive the folder that was --output of `prefer`."
        ) from error
    found: dict[str, Vote] = {}
    for number, line in enumerate(lines, 1):
        try:
            vote = _checked(parse_json(line))
        except ValueError as error:
            raise ConfigError(
                f"{folder / VOTES}:{number}: {str(error)[:200]}. Remove this line, or the folder."
            ) from error
        found.pop(vote["task"], None)
        if vote["choice"] != UNDONE:
            found[vote["task"]] = vote
    return found


def _checked(vote: Any) -> Vote:
    """Returns a vote, once it has the form of one."""
    texts = ("task", "prompt", "left", "choice")
    if not isinstance(vote, dict) or not all(isinstance(vote.get(name), str) for name in texts):
        raise ValueError("it is no choice")
    for name in ("models", "answers"):
        pair = vote.get(name)
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise ValueError(f"{name!r} are no two texts")
    if vote["left"] not in vote["models"] or vote["choice"] not in (*vote["models"], *RESERVED):
        raise ValueError("it names a model that is none of the two")
    return vote
