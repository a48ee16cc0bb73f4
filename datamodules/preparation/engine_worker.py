"""What all engines do in their worker processes, and what they say of those that die."""

from __future__ import annotations

import os
import platform
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.contracts import Engine
from core.errors import ConfigError

ATTEMPTS = 3
"""After so many deaths over one task the run stops."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Work = Callable[[dict[str, Any]], dict[str, Any]]
Answer = tuple[str, Any]
"""How a task went, one of "done", "mistake" and "error", and what it returned or raised."""


def cores() -> int:
    """Returns how many cores this process may use; all of the machine where the system does not tell, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables while processes are started, which inherit them; whatever is changed is put back."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def use_one_thread() -> None:
    """Keeps this process to one thread: there are as many processes as cores."""
    os.environ.update(ONE_THREAD)
    import pyarrow

    pyarrow.set_cpu_count(1)


def answer(work: Work, task: dict[str, Any]) -> Answer:
    """Does a task; returns what becomes of it, errors included, for another process."""
    try:
        return "done", work(task)
    except ConfigError as error:
        return "mistake", str(error)
    except Exception:
        return "error", traceback.format_exc()


def result(found: Answer, engine: object) -> dict[str, Any]:
    """Returns what a task returned.

    Raises:
        ConfigError: The one that it raised.
        RuntimeError: If it raised anything else; holds the traceback.
    """
    kind, value = found
    if kind == "mistake":
        raise ConfigError(value)
    if kind == "error":
        raise RuntimeError(f"A worker of {type(engine).__name__} failed:\n{value}")
    return value  # type: ignore[no-any-return]


def deadly(task: Mapping[str, Any], cause: str, engine: object) -> ConfigError:
    """Returns the error of a task that process after process has died over; `cause` goes on with the sentence."""
    paths = [piece.get("path", "") for piece in task.get("pieces", [])]
    reads = f"\nIt reads {', '.join(paths[:3])}{'...' if len(paths) > 3 else ''}." if any(paths) else ""
    return ConfigError(
        f"{type(engine).__name__}: task {task.get('number')} ended its process {ATTEMPTS} times, {cause}.{reads}"
    )


@dataclass
class InSharedFolder:
    """Does a task once it is sure that this machine sees the folder that all write to.

    Args:
        work: Does the task.
        mark: A file in that folder.
    """

    work: Work
    mark: Path

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """Does the task; ConfigError if this machine does not see the folder, or another one of that name."""
        if not self.mark.exists():
            raise ConfigError(
                f"The machine {platform.node()} does not see {self.mark.parent}, where the others write.\nMachines that "
                "prepare together need a file system that they share, for data.source and for --output (data.cache_dir)."
            )
        return self.work(task)


def over_tasks(
    engine: Engine | None, folder: Path, work: Work, tasks: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Does tasks on an engine, or in this process if there is none; yields what they return.

    Args:
        engine: Where.
        folder: What the tasks write to, which every process has to see.
        work: Does a task.
        tasks: The tasks.
    """
    if engine is None:
        yield from map(work, tasks)
        return
    mark = folder / f"{uuid.uuid4().hex}.tmp"
    mark.touch()
    yield from engine.run(InSharedFolder(work, mark), tasks)
    mark.unlink()
