"""Checkpoints that are whole or absent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from core.checkpoints import sharded
from core.checkpoints.checkpoint import defect
from core.errors import ConfigError
from core.files import durable
from core.technique import technique


@technique(
    paper="write to a temporary name, fsync, rename: POSIX rename(2) replaces atomically", maturity="stable"
)
class AtomicCheckpoint(CheckpointIO):
    """Writes each checkpoint under a temporary name, flushes it to the disk, then renames it.

    A kill, a crash or a full disk at any moment leaves the earlier checkpoints as they were, and none
    that is cut off. Nothing is serialised in memory first. Loading takes tensors and plain values
    only (`weights_only=True`), memory-mapped.

    Raises:
        ConfigError: If there is no space left, or the file to load is not whole.

    Example:
        trainer:
          plugins+:
            - class_path: AtomicCheckpoint
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint; called on rank 0."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            with _interrupts_wait():
                with open(temporary, "wb") as file:
                    torch.save(checkpoint, file)
                durable.sync(temporary)
                os.replace(temporary, path)
                durable.sync(path.parent)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            written = temporary.stat().st_size if temporary.exists() else 0
            with suppress(OSError):
                temporary.unlink()
            raise failure(path, error, written) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint onto the CPU unless `map_location` says otherwise."""
        if reason := defect(Path(path)):
            raise ConfigError(f"{path}: {reason}. --ckpt_path last finds the newest whole checkpoint.")
        if sharded.is_sharded(Path(path)):
            return sharded.read(Path(path))
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location or "cpu", weights_only=True, mmap=True
        )
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint."""
        remove(Path(path))


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until the file is written: raised inside torch's writer it aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *received: waiting.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting and callable(before):
        before(*waiting[0])


def failure(path: Path, error: Exception, written: int) -> ConfigError:
    """Returns what to say of a checkpoint that could not be written, of which so many bytes were."""
    earlier = sorted(path.parent.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns)
    kept = f"The last good one is {earlier[-1]}." if earlier else "There is no earlier one."
    return ConfigError(
        f"The checkpoint {path} could not be written: {reason(error)} ({written:,} bytes were).\n"
        f"{kept}\nMake room on the disk, then resume with --ckpt_path last."
    )


def reason(error: Exception) -> str:
    """Returns what the system said of a write that failed, through whatever was made of it since."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]


def remove(path: Path) -> None:
    """Deletes a checkpoint, a file or a folder, which is under its name no longer as soon as a part is missing."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(set_aside(path) if path.suffix == ".ckpt" else path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Takes its name from a checkpoint, if there is one; returns where it lies now, for nobody to load."""
    gone = path.with_name(f".{path.stem}.removed.ckpt.tmp")
    remove(gone)  # of a run that was killed here
    with suppress(FileNotFoundError):
        os.replace(path, gone)
    return gone


def remove_leftovers(folder: Path) -> None:
    """Deletes what runs left that were killed while they wrote or removed a checkpoint."""
    for leftover in folder.glob(".*.ckpt.tmp"):
        remove(leftover)
