"""Checkpoints of one file, which is either complete or absent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from core import durable
from core.errors import ConfigError
from core.technique import technique
from plugins.checkpoints import sharded, shared_check
from plugins.checkpoints.background import Background
from plugins.checkpoints.checkpoint import checked
from plugins.checkpoints.patience import Patience, no_room
from plugins.checkpoints.shared_memory import separate
from plugins.checkpoints.uploads import Staging, folder_of, keep_file, upload_file
from toolkit import remote_checkpoints
from toolkit.checkpoint_names import step_named
from toolkit.local_paths import is_url, require_local_path
from toolkit.selection import Run, Selected


@technique(
    paper="write to a temporary name, fsync, rename: POSIX rename(2) replaces atomically", maturity="stable"
)
class AtomicCheckpoint(CheckpointIO):
    """Writes each checkpoint under a temporary name, flushes it to the disk, then renames it.

    If the run is killed, crashes or fills the disk, earlier checkpoints stay as they were and no truncated one
    remains. If the disk is full, the run prints a message, waits and tries again. Nothing is serialised in memory
    first. Loading accepts tensors and plain values only (`weights_only=True`) and maps the file into memory.

    To a URL such as `s3://bucket/runs/first/step-00000100.ckpt` the file is uploaded while training continues; the next
    checkpoint waits for that. It exists there once its size and checksum have been written beside it, as the last.
    What cannot be uploaded stays on this machine, and so does what is saved afterwards.

    Raises:
        ConfigError: If the file cannot be written or uploaded, a signal ends the wait for space on the disk, or the file to
            load is not complete; if a callback that cannot write to URLs names one.

    Example:
        trainer:
          plugins+:
            - class_path: AtomicCheckpoint
    """

    # Not in a constructor, which classes derived from this one may not call.
    @cached_property
    def _background(self) -> Background:
        return Background()

    @cached_property
    def _staging(self) -> Staging:
        return Staging()

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields callbacks of others that would write to a URL: a local folder `s3:` would be made."""
        for item in run.selected:
            if "writes_to_urls" in item.declaration.offers:
                continue
            try:
                require_local_path(str(item.arguments.get("dirpath")), f"{item.name}: dirpath")
            except ConfigError as error:
                yield str(error)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint; called on rank 0."""
        if not is_url(str(path)):
            self._write_patiently(checkpoint, Path(path))
            return
        folder, key = folder_of(str(path), self._background.patience.ending)
        self._background.wait()
        self._write_patiently(checkpoint, staged := self._staging.path_of(key))
        if self._staging.failure is None:
            self._background.submit(self._staging.attempt, folder, upload_file, staged, folder)
        else:
            keep_file(staged)

    def stage_in(self, folder: Path) -> None:
        """Says where checkpoints are written before they are uploaded; what a killed run left there is deleted."""
        self._staging = Staging(folder)
        self._staging.clear()

    def wait(self) -> None:
        """Waits for the checkpoint that is being uploaded, if any.

        Raises:
            ConfigError: If it, or one before, could not be.
        """
        self._background.wait()
        self._staging.require_uploaded()

    def require_uploaded(self) -> None:
        """Raises a ConfigError if a checkpoint could not be uploaded."""
        self._staging.require_uploaded()

    def end_soon(self) -> None:
        """Ends uploads as soon as the storage does not answer."""
        self._background.patience.ending.set()

    def teardown(self) -> None:
        """Waits at the end of the run, also after an error."""
        self._background.close()
        self._staging.close()

    def _write_patiently(self, checkpoint: dict[str, Any], path: Path) -> None:
        patience = Patience()
        while True:
            try:
                self._write(checkpoint, path)
                break
            except ConfigError as error:
                if not no_room(error):
                    raise
                patience.wait(error)
        patience.over()

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
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
        """Reads a checkpoint, onto the CPU unless `map_location` is given; called on every rank.

        Raises:
            ConfigError: On every rank, if one of them found it damaged.
        """
        path = shared_check.agreed(Path(path))
        if sharded.is_sharded(path):
            return sharded.read_opened(shared_check.check(path))
        shared_check.check_file(path)
        loaded = torch.load(path, map_location=map_location or "cpu", weights_only=True, mmap=True)
        content = checked(loaded, path)
        for optimizer in content.get("optimizer_states", ()):
            separate(optimizer)
        return content

    def read_parts(self, path: Any) -> dict[str, Any] | None:
        """Returns a sharded checkpoint with stored tensors in place of tensors; None for a file; called on every rank.

        Raises:
            ConfigError: On every rank, if one of them found a file damaged.
        """
        folder = shared_check.provided(Path(path))
        if not sharded.is_sharded(folder):
            return None
        return sharded.read_without_tensors(shared_check.check(folder))

    def fill(self, pairs: Iterable[tuple[Any, Tensor]]) -> None:
        """Reads stored tensors, or this rank's shards of DTensors; does not communicate with other ranks."""
        sharded.load_tensors(pairs)

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint; one on object storage after what is being uploaded."""
        if not is_url(str(path)):
            remove(Path(path))
            return
        folder, name = folder_of(str(path), self._background.patience.ending)
        self._background.submit_aside(remote_checkpoints.remove, folder, name)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delays Ctrl-C until the file is written: raised inside torch's writer it would abort the process."""
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
    """Returns the error for a checkpoint that could not be written, after `written` bytes."""
    earlier = sorted(path.parent.glob("*.ckpt"), key=lambda p: (step_named(p) or 0, p.name))
    kept, then = "There is no earlier one.", "start the run again as you did"
    if earlier:
        kept, then = f"The last good one is {earlier[-1]}.", f"resume with --ckpt_path {earlier[-1]}"
    fix = "Free space on the disk" if no_room(error) else "Correct that"
    return ConfigError(
        f"The checkpoint {path} could not be written: {system_error(error)} ({written:,} bytes were).\n"
        f"{kept}\n{fix}, then {then}."
    )


def system_error(error: Exception) -> str:
    """Returns the operating system's reason for a failed write, found in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]


def remove(path: Path) -> None:
    """Deletes a checkpoint, a file or a folder; a folder is renamed first, so that no incomplete one has its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        shared_check.note_of(path).unlink(missing_ok=True)
        return
    shutil.rmtree(set_aside(path) if path.suffix == ".ckpt" else path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint, if it exists, to a name that is never loaded; returns the new path."""
    gone = path.with_name(f".{path.stem}.removed.ckpt.tmp")
    remove(gone)  # of a run that was killed here
    with suppress(FileNotFoundError):
        os.replace(path, gone)
    return gone


def remove_leftovers(folder: Path) -> None:
    """Deletes temporary files of runs that were killed while they wrote or removed a checkpoint."""
    for leftover in folder.glob(".*.ckpt.tmp"):
        remove(leftover)
