"""Uploads checkpoints that were written to a folder of this machine; what makes one complete is written last."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core import durable
from core.errors import ConfigError
from plugins.checkpoints.checked_files import checksum
from plugins.checkpoints.part_tables import data_file, table_file
from toolkit import remote_checkpoints
from toolkit.object_storage import ObjectFolder


class Staging:
    """The folder of this machine in which checkpoints are written before they are uploaded.

    Args:
        folder: The folder, which may be on a disk that ranks share; None: a temporary one.

    Attributes:
        failure: Why the first of the checkpoints that are still here could not be uploaded; None: all could.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.failure: ConfigError | None = None
        self._remote: ObjectFolder
        self._told = False

    def clear(self) -> None:
        """Deletes what a killed run has left unfinished: this rank's files, and on the first rank all others.

        A file that is complete stays until a later one is uploaded: the run may resume from it.
        """
        if self._folder is None:
            return
        rank = _rank()
        with suppress(FileNotFoundError):  # ranks with a common disk delete at the same time
            for name in (data_file(rank), table_file(rank)):
                for path in self._folder.glob(f".*.tmp/{name}"):
                    path.unlink()
        for path in self._folder.glob(".*.tmp") if rank == 0 else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def path_of(self, key: str) -> Path:
        """Returns where a checkpoint is written."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="leyden-uploads-"))
        return self._folder / key

    def attempt(self, folder: ObjectFolder, task: Callable[..., None], *arguments: Any) -> None:
        """Does what uploads a checkpoint to a folder, or notes why it failed."""
        try:
            task(*arguments)
        except (
            ConfigError,
            OSError,
        ) as error:  # raised on this rank alone, it would leave the others waiting
            if isinstance(error, OSError):
                error = ConfigError(f"A checkpoint cannot be uploaded to {folder.url}: {error}.")
            self.failure, self._remote = self.failure or error, folder

    def require_uploaded(self) -> None:
        """Raises a ConfigError if checkpoints could not be uploaded: which, where they are, what to do with them."""
        if self.failure is not None:
            self._told = True
            raise ConfigError(self._report()) from self.failure

    def _report(self) -> str:
        folder = self._folder or Path()
        names = sorted(path.name for path in folder.glob("[!.]*.ckpt"))
        if not names:
            return (
                f"{self.failure}\nNo complete one is in {folder}: the parts of a sharded one may be on the disks of several "
                "machines. Go on from an earlier checkpoint."
            )
        return (
            f"{self.failure}\nNot uploaded, and complete in {folder}: {', '.join(names[-4:])}.\n"
            f"To go on from there: --ckpt_path {folder / names[-1]}\n"
            f"To upload by hand: {self._remote.copy_command(folder)}"
        )

    def close(self) -> None:
        """Removes the folder unless it holds a checkpoint that could not be uploaded; says so if nobody was told.

        Raises:
            ConfigError: In that case, unless the run ends with another error.
        """
        with suppress(OSError):
            if self._folder is not None:
                self._folder.rmdir()
        if self.failure is None or self._told:
            return
        if sys.exc_info()[1] is None:
            self.require_uploaded()
        if _rank() == 0:
            print(self._report(), file=sys.stderr, flush=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def folder_of(url: str, ending: threading.Event | None = None) -> tuple[ObjectFolder, str]:
    """Returns the folder of a checkpoint's URL, and the checkpoint's name in it.

    Args:
        url: The checkpoint's.
        ending: Is set once the run is to end.
    """
    place, _, key = url.rstrip("/").rpartition("/")
    return ObjectFolder(place, "The checkpoint's URL", uploads=True, ending=ending), key


def upload_file(staged: Path, folder: ObjectFolder) -> None:
    """Uploads a checkpoint of one file, and deletes it here, with those that could not be uploaded before.

    Raises:
        ConfigError: If it could not be uploaded; the file is still here.
    """
    try:
        remote_checkpoints.begin(folder, staged.name)
        sums = checksum(staged)
        folder.put(staged.name, staged)
        found = folder.look_up(staged.name)
        _require(folder, staged.name, sums["bytes"], found.size if found else None)
        remote_checkpoints.complete(folder, staged.name, False, json.dumps(sums).encode())
    except ConfigError:
        keep_file(staged)
        raise
    delete_staged(staged.parent)


def keep_file(staged: Path) -> None:
    """Writes beside a file what makes it complete when both are copied to object storage by hand."""
    with suppress(OSError):  # the file alone is enough to go on from
        name = remote_checkpoints.complete_name(staged.name, sharded=False)
        durable.write(staged.with_name(name), json.dumps(checksum(staged)))


def delete_staged(folder: Path) -> None:
    """Deletes the checkpoints in the folder of staged ones: a later one is uploaded."""
    for path in folder.glob(
        "[!.]*.ckpt*"
    ):  # what stays, such as open files on NFS, does no harm: it is complete
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def upload(folder: ObjectFolder, key: str, staged: Path, names: Iterable[str]) -> None:
    """Uploads files of a sharded checkpoint."""
    for name in names:
        folder.put(f"{key}/{name}", staged / name)


def complete(folder: ObjectFolder, key: str, sizes: Mapping[str, int], marker: str) -> None:
    """Makes a sharded checkpoint complete, once all of its files are there."""
    found = folder.below(key)
    for name, size in sizes.items():
        _require(folder, f"{key}/{name}", size, found[name].size if name in found else None)
    remote_checkpoints.complete(folder, key, True, marker.encode())


def _require(folder: ObjectFolder, name: str, size: int, found: int | None) -> None:
    if found != size:
        what = "is not there" if found is None else f"has {found:,} bytes"
        raise ConfigError(
            f"{folder.url}/{name} {what} after it was uploaded with {size:,}: something else writes to or deletes from "
            "that folder.\nGive each run a folder of its own."
        )
