"""Uploads checkpoints that were written to a folder of this machine; what makes one complete is written last."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from core.errors import ConfigError
from plugins.checkpoints import sharded
from toolkit import remote_checkpoints
from toolkit.object_storage import ObjectFolder


class Staging:
    """The folder of this machine in which checkpoints are written before they are uploaded.

    Args:
        folder: The folder, which may be on a disk that ranks share; None: a temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Deletes what a killed run has left unfinished: this rank's files, and on the first rank all others.

        A file that is complete stays until a later one is uploaded: the run may resume from it.
        """
        if self._folder is None:
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        with suppress(FileNotFoundError):  # ranks with a common disk delete at the same time
            for path in self._folder.glob(f".*.tmp/__{rank}_*.distcp"):
                path.unlink()
        for path in self._folder.glob(".*.tmp") if rank == 0 else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def path_of(self, key: str) -> Path:
        """Returns where a checkpoint is written."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="leyden-uploads-"))
        return self._folder / key

    def close(self) -> None:
        """Removes the folder unless it holds a checkpoint that could not be uploaded."""
        with suppress(OSError):
            if self._folder is not None:
                self._folder.rmdir()


def folder_of(url: str) -> tuple[ObjectFolder, str]:
    """Returns the folder of a checkpoint's URL, and the checkpoint's name in it."""
    place, _, key = url.rstrip("/").rpartition("/")
    return ObjectFolder(place, "The checkpoint's URL", uploads=True), key


def upload_file(staged: Path, folder: ObjectFolder) -> None:
    """Uploads a checkpoint of one file, and deletes it here, with those that could not be uploaded before.

    Raises:
        ConfigError: If it could not be uploaded: it says that the file is still here.
    """
    try:
        remote_checkpoints.begin(folder, staged.name)
        sums = sharded.checksum(staged)
        folder.put(staged.name, staged)
        found = folder.look_up(staged.name)
        _require(folder, staged.name, sums["bytes"], found.size if found else None)
        remote_checkpoints.complete(folder, staged.name, False, json.dumps(sums).encode())
    except ConfigError as error:
        raise ConfigError(f"{error}\nThe checkpoint is complete here: --ckpt_path {staged}.") from error
    for path in staged.parent.glob("*.ckpt"):
        path.unlink()


def upload(folder: ObjectFolder, key: str, staged: Path, names: Iterable[str]) -> None:
    """Uploads files of a sharded checkpoint, and deletes them here."""
    for name in names:
        folder.put(f"{key}/{name}", staged / name)
        (staged / name).unlink()


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
