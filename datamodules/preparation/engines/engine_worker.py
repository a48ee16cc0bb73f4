"""Code that all engines share: setting up worker processes, running tasks in them, and their errors."""

from __future__ import annotations

import ctypes
import os
import platform
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.contracts import Engine
from core.errors import ConfigError

ATTEMPTS = 3
"""Number of times that a task may end its process before the run stops."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Work = Callable[[dict[str, Any]], dict[str, Any]]
Answer = tuple[str, Any]
"""One of "done", "mistake" (a ConfigError) and "error", and what the task returned or raised."""


def cores() -> int:
    """Returns the number of cores that this process may use; on systems without affinity, such as macOS, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for processes that are started in the block; restores all of them afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def use_one_thread() -> None:
    """Limits this process to one thread: there are as many processes as cores."""
    os.environ.update(ONE_THREAD)
    import pyarrow

    pyarrow.set_cpu_count(1)


def return_memory() -> None:
    """Returns freed memory to the system if the C library supports it: glibc keeps what `tokenizers` frees."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def answer(work: Work, task: dict[str, Any]) -> Answer:
    """Runs a task; returns its result or its error, to be sent to another process."""
    try:
        return "done", work(task)
    except ConfigError as error:
        return "mistake", str(error)
    except Exception:
        return "error", traceback.format_exc()


def result(found: Answer, engine: object) -> dict[str, Any]:
    """Returns what a task returned.

    Raises:
        ConfigError: If the task raised one.
        RuntimeError: If it raised anything else; with the traceback.
    """
    kind, value = found
    if kind == "mistake":
        raise ConfigError(value)
    if kind == "error":
        raise RuntimeError(f"A worker of {type(engine).__name__} failed:\n{value}")
    return value  # type: ignore[no-any-return]


def deadly(task: Mapping[str, Any], cause: str, engine: object) -> ConfigError:
    """Returns the error for a task that ended all its processes; `cause` completes the sentence."""
    paths = [piece.get("path", "") for piece in task.get("pieces", [])]
    reads = f"\nIt reads {', '.join(paths[:3])}{'...' if len(paths) > 3 else ''}." if any(paths) else ""
    return ConfigError(
        f"{type(engine).__name__}: task {task.get('number')} ended its process {ATTEMPTS} times, {cause}.{reads}"
    )


@dataclass
class InSharedFolder:
    """Runs a task after checking that this machine sees the folder that all machines write to.

    Args:
        work: Runs the task.
        mark: A file in that folder.
    """

    work: Work
    mark: Path

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        """Runs the task; raises a ConfigError if this machine does not see the folder, or another one of that name."""
        if not self.mark.exists():
            raise ConfigError(
                f"The machine {platform.node()} does not see {self.mark.parent}, where the others write.\nMachines that "
                "prepare together need a file system that they share, for data.source and for --output (data.cache_dir)."
            )
        return self.work(task)


def over_tasks(
    engine: Engine | None, folder: Path, work: Work, tasks: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Runs tasks on an engine, or in this process if there is none; yields their results.

    Args:
        engine: The engine; None: this process.
        folder: The folder that the tasks write to; every process has to see it.
        work: Runs a task.
        tasks: The tasks.
    """
    if engine is None:
        yield from map(work, tasks)
        return
    mark = folder / f"{uuid.uuid4().hex}.tmp"
    mark.touch()
    yield from engine.run(InSharedFolder(work, mark), tasks)
    mark.unlink()
