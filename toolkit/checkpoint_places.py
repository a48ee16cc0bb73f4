"""Where a run keeps its checkpoints: a folder of this machine, or one on object storage."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from core.errors import ConfigError
from toolkit import remote_checkpoints, storage_owner
from toolkit.checkpoint_names import ABANDONED, step_named
from toolkit.local_paths import is_url
from toolkit.object_storage import LOOK_S, ObjectFolder

__all__ = ["LocalPlace", "Place", "RemotePlace", "StagesUploads", "place_of", "require_uploads"]


@runtime_checkable
class StagesUploads(Protocol):
    """A `CheckpointIO` that writes to URLs of object storage.

    What cannot be uploaded is kept on this machine, with what is saved after it; `wait` raises it.
    """

    def require_uploaded(self) -> None:
        """Raises a ConfigError if a checkpoint could not be uploaded, without waiting for one that is being uploaded."""

    def stage_in(self, folder: Path) -> None:
        """Says in which folder of this machine checkpoints are written before they are uploaded; called on every rank."""

    def end_soon(self) -> None:
        """The run is to end: an outage of the storage is not waited out any more."""


class Place(Protocol):
    """What `PeriodicCheckpoint` does in the folder of its checkpoints; called on rank 0, but for `path_of`."""

    def path_of(self, name: str) -> Path | str:
        """Returns the path or URL of a checkpoint."""

    def check(self, resumed: bool, run_folder: Path, run: str) -> str:
        """Raises a ConfigError if nothing can be written: at the first checkpoint it would be too late.

        Args:
            resumed: Whether the run begins from a checkpoint.
            run_folder: The folder of the run.
            run: What this returned in the run that wrote that checkpoint, or "".

        Returns:
            The id of the run at this place, for its checkpoints; "" if it needs none.
        """

    def set_aside(self, step: int, ends: Callable[[], bool] | None = None) -> dict[str, str]:
        """Renames the checkpoints after a step, which belong to a discarded history; returns the new names.

        Args:
            step: The step.
            ends: Returns whether the run is to end: an outage of the storage is then not waited out any more.
        """

    def saved(self, name: str) -> None:
        """A checkpoint is being written, and the one before it is complete."""

    def settled(self) -> None:
        """All checkpoints are complete."""

    def present(self, names: Sequence[str]) -> list[str]:
        """Returns which checkpoints are complete."""


def place_of(dirpath: str) -> Place:
    """Returns the place that a path or URL names."""
    return RemotePlace(dirpath) if is_url(dirpath) else LocalPlace(dirpath)


class LocalPlace:
    """A folder of this machine."""

    def __init__(self, dirpath: str) -> None:
        self.folder = Path(dirpath)

    def path_of(self, name: str) -> Path:
        """Returns the path of a checkpoint."""
        return self.folder / name

    def check(self, resumed: bool, run_folder: Path, run: str) -> str:
        """Raises a ConfigError if nothing can be written."""
        folder = self.folder.absolute()
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            fault = "is no folder" if not place.is_dir() else "cannot be written"
            raise ConfigError(
                f"PeriodicCheckpoint: dirpath is {self.folder}, and {place} {fault}. Set another."
            )
        return ""

    def set_aside(self, step: int, ends: Callable[[], bool] | None = None) -> dict[str, str]:
        """Renames the checkpoints after a step."""
        renamed = {}
        for path in sorted(self.folder.glob("step-*.ckpt")):
            if (step_named(path) or 0) <= step or ABANDONED in path.name:
                continue
            number, name = 1, f"{path.stem}{ABANDONED}.ckpt"
            while path.with_name(name).exists():
                number += 1
                name = f"{path.stem}{ABANDONED}-{number}.ckpt"
            path.rename(path.with_name(name))
            renamed[path.name] = name
        return renamed

    def saved(self, name: str) -> None:
        """Does nothing: the disk knows."""

    def settled(self) -> None:
        """Does nothing: the disk knows."""

    def present(self, names: Sequence[str]) -> list[str]:
        """Returns which checkpoints are complete."""
        return [name for name in names if self.path_of(name).exists()]


class RemotePlace:
    """A folder on object storage, which one run writes to; it is listed as the run starts."""

    def __init__(self, url: str) -> None:
        self.folder = ObjectFolder(url, "PeriodicCheckpoint: dirpath")
        self._run_folder: Path | None = None
        self._complete: set[str] = set()
        self._pending: str | None = None

    def path_of(self, name: str) -> str:
        """Returns the URL of a checkpoint."""
        return f"{self.folder.url}/{name}"

    def check(self, resumed: bool, run_folder: Path, run: str) -> str:
        """Raises a ConfigError if nothing can be written, or a run would mix its checkpoints with those of another.

        What a killed run left of an unfinished upload is deleted; what somebody copied there is not.
        """
        complete, partial, others = remote_checkpoints.listed(self.folder)
        there = [*others, *(found.name for found in complete)]
        if there and not resumed:
            raise ConfigError(
                f"PeriodicCheckpoint: dirpath is {self.folder.url}, which holds checkpoints of another run "
                f"({there[-1]}).\nGo on from there: --ckpt_path {self.folder.url}. Or name another folder, such "
                "as one with ${run_folder} in its URL."
            )
        self.folder.put(".write-test", b"")
        self.folder.remove([".write-test"])
        own = storage_owner.take(self.folder, run, run_folder, there)
        for key in partial:
            remote_checkpoints.remove(self.folder, key)
        self._complete = {found.name for found in complete}
        self._run_folder = run_folder
        return own

    def set_aside(self, step: int, ends: Callable[[], bool] | None = None) -> dict[str, str]:
        """Marks the checkpoints after a step; an outage is waited out, as the run may be in the middle, unless a signal ends it.

        Until all are marked, the run folder says so for a run that is resumed.
        """
        if self._run_folder is not None:
            remote_checkpoints.note_return(self._run_folder, self.folder.url, step)
        ending = threading.Event()
        with ThreadPoolExecutor(1) as thread:  # requests hold up signals, a wait for another thread does not
            try:
                marked = thread.submit(self._set_aside, step, ending)
                while not wait([marked], LOOK_S).done and not (ends is not None and ends()):
                    pass
            finally:
                ending.set()
            renamed = marked.result()
        if self._run_folder is not None:
            remote_checkpoints.forget_return(self._run_folder)
        return renamed

    def _set_aside(self, step: int, ending: threading.Event) -> dict[str, str]:
        patient = ObjectFolder(self.folder.url, uploads=True, ending=ending)
        renamed = {
            found.name: remote_checkpoints.set_aside(found)
            for found in remote_checkpoints.listed(patient).complete
            if (step_named(Path(found.key)) or 0) > step and ABANDONED not in found.name
        }
        self._complete = {renamed.get(name, name) for name in self._complete}
        return renamed

    def saved(self, name: str) -> None:
        """A checkpoint is being uploaded, and the one before it is complete."""
        self.settled()
        self._pending = name
        self._complete -= {name, f"{Path(name).stem}{ABANDONED}.ckpt"}

    def settled(self) -> None:
        """All uploads are complete."""
        self._complete |= {self._pending} if self._pending else set()
        self._pending = None

    def present(self, names: Sequence[str]) -> list[str]:
        """Returns which checkpoints are complete."""
        return [name for name in names if name in self._complete]


def require_uploads(checkpoint_io: Any, dirpath: str) -> StagesUploads:
    """Returns the checkpoint format of a run that writes to a URL.

    Raises:
        ConfigError: If it writes to folders of this machine only.
    """
    if isinstance(checkpoint_io, StagesUploads):
        return checkpoint_io
    raise ConfigError(
        f"PeriodicCheckpoint: dirpath is {dirpath}, and {type(checkpoint_io).__name__} writes to folders of this machine "
        "only.\nSet a folder, or trainer.plugins to AtomicCheckpoint or ShardedCheckpoint."
    )
