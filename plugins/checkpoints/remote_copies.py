"""Checkpoints on object storage, read through copies on this machine.

A copy has a folder of its own below `$XDG_CACHE_HOME/leyden/checkpoints`, which all processes of the machine share. A
checkpoint of one file is downloaded when it is looked at, of a sharded one what is common to all ranks; files of ranks are,
once for the machine, when a process reads them. Each is compared with its SHA-256. Copies that no process uses are deleted when
another checkpoint is downloaded.

Paths of copies are known to the process that has listed the URL: a folder on a disk never makes it connect.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from core import durable
from core.data.token_datamodule import default_cache_dir
from core.errors import ConfigError
from toolkit import remote_checkpoints
from toolkit.bounded import parse_json
from toolkit.checkpoint_names import step_named
from toolkit.file_claims import claimed, publish
from toolkit.object_storage import ObjectFolder
from toolkit.remote_checkpoints import COMPLETE, RemoteCheckpoint
from toolkit.sizes import readable

MANIFEST, OF_RANKS = "manifest.json", (".distcp", ".parts")
MOST_MANIFEST_BYTES = 2**28
IN_USE, DESCRIBED = "in-use", "described"


class _Damage(Exception):
    """Why what is there is not what was uploaded."""


@dataclass
class _Copy:
    """A checkpoint on object storage, and its copy.

    Attributes:
        remote: The checkpoint.
        path: The copy.
        run: The run folder whose configuration names the URL.
        files: Name -> size and SHA-256 of each file of a sharded one, once it is known.
    """

    remote: RemoteCheckpoint
    path: Path
    run: Path | None
    files: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def provide(self) -> None:
        """Downloads it, or what describes it, unless a process of this machine has done it."""
        _hold(self.path.parent)
        if self.remote.sharded:
            with claimed(self.path.parent / DESCRIBED):  # one process at a time
                self._describe()
        elif not self.path.exists():
            self._fetch(self.remote.key, self.path, _object(self._marker(), COMPLETE))

    def _describe(self) -> None:
        here = (self.path / COMPLETE).exists()
        content = (self.path / MANIFEST).read_bytes() if here else self._manifest()
        files = _object(content, MANIFEST).get("files")
        if not isinstance(files, dict) or any(Path(name).name != name for name in files):
            raise _Damage(f"{MANIFEST} names files outside of the folder")
        self.files = files
        if here:
            return
        self._require_all()
        for name in files:
            if not name.endswith(OF_RANKS):
                self.fetch(name)
        durable.write(self.path / MANIFEST, content)
        durable.write(self.path / COMPLETE, f"{hashlib.sha256(content).hexdigest()}\n")

    def _manifest(self) -> bytes:
        content = self.remote.folder.read(f"{self.remote.key}/{MANIFEST}", MOST_MANIFEST_BYTES)
        if hashlib.sha256(content).hexdigest() != self._marker().decode("ascii", "replace").strip():
            raise _Damage(f"{MANIFEST} is damaged")
        return content

    def _marker(self) -> bytes:
        remote = self.remote
        return remote.folder.read(remote_checkpoints.complete_name(remote.key, remote.sharded), 4096)

    def _require_all(self) -> None:
        """Raises a _Damage if a file is not there, or has another size: it may have been deleted by hand."""
        there = self.remote.folder.below(self.remote.key)
        for name, expected in self.files.items():
            if name not in there or there[name].size != expected.get("bytes"):
                raise _Damage(f"{name} is {'damaged' if name in there else 'missing'}")

    def fetch(self, name: str) -> None:
        """Downloads a file of a sharded checkpoint, unless it is here."""
        if name not in self.files:
            raise _Damage(f"{MANIFEST} does not name {name}")
        self._fetch(f"{self.remote.key}/{name}", self.path / name, self.files[name])

    def _fetch(self, name: str, path: Path, expected: Mapping[str, Any]) -> None:
        if path.exists():
            return
        size = expected.get("bytes")
        if not isinstance(size, int) or size < 0:
            raise _Damage(f"the size of {name} is not stored")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with claimed(path) as stream:
                if path.exists():  # another process was first
                    return
                if size > shutil.disk_usage(path.parent).free:
                    raise OSError(f"there is no room for {readable(size)}")
                self.remote.folder.fetch(name, stream, size)
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected.get("sha256"):  # type: ignore[arg-type]
                    raise _Damage(f"{name} is damaged (SHA-256)")
                publish(stream, path)
        except OSError as error:
            raise ConfigError(
                f"{self.remote.url} cannot be copied to {path.parent}: {error.strerror or error}.\nCopies of checkpoints are "
                "kept in $XDG_CACHE_HOME/leyden, by default ~/.cache/leyden: set XDG_CACHE_HOME to a folder with room."
            ) from error


_copies: dict[Path, _Copy] = {}
_held: dict[Path, IO[bytes]] = {}


def listed(url: str, run: Path | None = None) -> list[Path]:
    """Returns the copies of the complete checkpoints at a URL or in its folder `checkpoints`; nothing is downloaded yet.

    Args:
        url: The folder.
        run: The run folder whose configuration names the URL.

    Raises:
        ConfigError: If the storage cannot be read.
    """
    folder = ObjectFolder(url, "--ckpt_path")
    found = remote_checkpoints.listed(folder).complete
    if not found:
        found = remote_checkpoints.listed(ObjectFolder(f"{folder.url}/checkpoints", "--ckpt_path")).complete
    paths = []
    for remote in found:
        back = None if run is None else remote_checkpoints.noted_return(run, remote.folder.url)
        if back is not None and (step_named(Path(remote.key)) or 0) > back:
            remote = replace(remote, abandoned=True)
        mark = f"{remote.url} {remote.marker.tag} {remote.marker.modified_ns}"
        folder_name = hashlib.sha256(mark.encode()).hexdigest()[:16]
        path = default_cache_dir().absolute() / "checkpoints" / folder_name / remote.name
        _copies.setdefault(path, _Copy(remote, path, run)).run = run
        paths.append(path)
    return paths


def provide(path: Path) -> str | None:
    """Downloads a copy, or what describes it; does nothing for other paths.

    Returns:
        Why it is damaged, or None.

    Raises:
        ConfigError: If it cannot be read or copied.
    """
    try:
        if (copy := _copies.get(path)) is not None:
            copy.provide()
    except _Damage as damage:
        return str(damage)
    return None


def provide_file(path: Path) -> None:
    """Downloads a file of a copy; does nothing for other paths.

    Raises:
        ConfigError: If it cannot be read or copied, or is damaged.
    """
    copy = _copies.get(path.parent)
    if copy is not None:
        try:
            copy.fetch(path.name)
        except _Damage as damage:
            raise ConfigError(
                f"{copy.remote.url}: {damage}. Resume from another: --ckpt_path URL."
            ) from damage


def here(path: Path) -> Path:
    """Returns this machine's path of a copy that another machine names, whose cache may be elsewhere."""
    return next((own for own in _copies if own.parts[-2:] == path.parts[-2:]), path)


def is_copy(path: Path) -> bool:
    """Returns whether a path is a copy that this process has listed."""
    return path in _copies


def run_of(path: Path) -> Path | None:
    """Returns the run folder whose configuration names the URL of a copy."""
    return _copies[path].run if path in _copies else None


def saved_ns(path: Path) -> int | None:
    """Returns when the checkpoint of a copy was completed, as `st_mtime_ns`; None for other paths."""
    return _copies[path].remote.marker.modified_ns if path in _copies else None


def shown(path: Path) -> str:
    """Returns what the user calls a checkpoint: the URL of a copy, otherwise the path."""
    return _copies[path].remote.url if path in _copies else str(path)


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise _Damage(f"{name} cannot be read") from error
    if not isinstance(found, dict):
        raise _Damage(f"{name} cannot be read")
    return found


def _hold(folder: Path) -> None:
    """Keeps a copy from being deleted while this process lives, and deletes those that none uses."""
    if folder in _held:
        return
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            stream = open(folder / IN_USE, "a+b")  # noqa: SIM115 - open as long as the process
            fcntl.flock(stream, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(stream.fileno()), (folder / IN_USE).stat()):
                    break
            stream.close()  # it was deleted meanwhile
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}.\nCopies of checkpoints are kept there: set XDG_CACHE_HOME to "
            "a folder with room."
        ) from error
    _held[folder] = stream
    for other in folder.parent.glob(f"*/{IN_USE}"):
        with suppress(OSError), open(other, "rb") as unused:
            fcntl.flock(unused, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = other.parent.with_name(f".{other.parent.name}.{os.getpid()}")
            other.parent.rename(gone)  # what another process downloads from now on has a folder of its own
            shutil.rmtree(gone, ignore_errors=True)
