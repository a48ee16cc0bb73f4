"""Prepared folders on object storage: what is read of them lies in a cache of limited size on this machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from lightning.fabric.utilities.rank_zero import _get_rank

from core.data.prepared import MANIFEST, SCHEMES
from core.errors import ConfigError
from core.files.file_claims import claimed, locked, publish

_FIRST = ("tokenizer.json", "train/index.json", "validation/index.json")
_PACKAGES = {"gs://": "google-cloud-storage", "azure://": "azure-storage-blob", "hf://": "huggingface_hub"}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_opened: dict[Path, RemoteFolder] = {}


def remote_of(folder: Path) -> RemoteFolder | None:
    """Returns the remote folder that a local one is the copy of, if this process has opened it."""
    return _opened.get(folder)


def open_remote(
    url: str, cache_dir: Path, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
) -> Path:
    """Downloads what says of a prepared folder what it holds; its chunks come when they are read.

    Args:
        url: The folder.
        cache_dir: The local copy is in `remote` in it, named after the manifest: changed data is another copy.
        cache_bytes: Most bytes of chunks to keep, of all remote folders together; None: three quarters of what
            is free on the disk.
        storage_options: Of the storage's client, such as `endpoint_url`.

    Returns:
        The local copy, which holds manifest.json, tokenizer.json and both index.json.

    Raises:
        ConfigError: If it cannot be read, is no prepared folder, or the cache cannot be written.
    """
    if cache_bytes is not None and cache_bytes < 1:
        raise ConfigError(f"data.cache_bytes is {cache_bytes}; it must be at least 1.")
    root = cache_dir / "remote"
    remote = RemoteFolder(url.rstrip("/"), root, 0, dict(storage_options or {}))
    content = io.BytesIO()
    remote.get(MANIFEST, content)
    remote.files = _listed(remote.url, content.getvalue())
    remote.folder = root / hashlib.sha256(content.getvalue()).hexdigest()[:16]
    with _writing(root):
        for split in ("train", "validation"):
            (remote.folder / split).mkdir(parents=True, exist_ok=True)
        with claimed(remote.folder / MANIFEST) as stream:
            stream.write(content.getvalue())
            publish(stream, remote.folder / MANIFEST)
        kept = sum(size for _, size, _ in _cached(root))
        remote.limit = cache_bytes or (shutil.disk_usage(root).free + kept) * 3 // 4
    for name in _FIRST:
        remote.fetch(name)
    _opened[remote.folder] = remote
    size = sum(told["bytes"] for name, told in remote.files.items() if name not in _FIRST)
    if size > remote.limit and _get_rank() in (None, 0):
        print(
            f"{remote.url} has {size / 1e9:,.1f} GB of shards, the cache {remote.limit / 1e9:,.1f} GB "
            "(data.cache_bytes): shuffled rows will cost up to a download each.",
            file=sys.stderr,
        )
    return remote.folder


def _listed(url: str, manifest: bytes) -> dict[str, dict[str, Any]]:
    """Returns what a manifest says of the files, which are known by size and SHA-256."""
    try:
        files = json.loads(manifest)["files"]
        known = {name for name, told in files.items() if {"bytes", "sha256"} <= told.keys()}
        if missing := {*files, *_FIRST} - known:
            raise ValueError(f"it does not describe {min(missing)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{url}/{MANIFEST} is damaged: {type(error).__name__}: {error}. Upload it again."
        ) from error
    return files


@dataclass(eq=False)
class RemoteFolder:
    """A prepared folder on object storage, and its local copy, to which chunks come and from which they go.

    Any number of processes and threads of a machine share the copy. A chunk is downloaded by one of them, held
    against its SHA-256, and then takes its name; it is deleted when room is needed, unless somebody has it mapped,
    those that were asked for longest ago first. What keeps others out are locks of the kernel's, which end with
    the process that holds them; what a killed one left behind is overwritten or deleted.

    Chunks that are mapped or under way stay, also if they alone take more than the limit.

    Args:
        url: The folder.
        folder: Its local copy.
        limit: Most bytes of chunks to keep, of all the copies that lie beside this one.
        options: Of the storage's client.
        files: Name -> size and SHA-256 of each file.
    """

    url: str
    folder: Path
    limit: int
    options: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _downloader: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_downloader": None}

    def map(self, name: str) -> np.ndarray:
        """Returns a file's bytes, mapped into memory; it is kept for as long as the array is alive."""
        while True:
            with suppress(FileNotFoundError), locked(self.fetch(name), fcntl.LOCK_SH) as stream:
                if stream and os.fstat(stream.fileno()).st_nlink:  # else it has been deleted meanwhile
                    # the mapping holds the lock from here on
                    return np.asarray(np.memmap(stream, np.uint8, mode="r"))  # type: ignore[call-overload]

    def fetch(self, name: str) -> Path:
        """Returns the local copy of a file, downloaded unless it is there.

        Raises:
            ConfigError: If it cannot be read or written, or is not what the manifest says.
        """
        path = self.folder / name
        with _writing(self.folder):
            with suppress(FileNotFoundError):
                os.utime(path)
                return path
            with claimed(path) as stream:
                if not path.exists():  # else another process was first
                    self._download(name, stream)
                    publish(stream, path)
        return path

    def fetch_head(self, name: str, size: int) -> Path:
        """Returns a local copy of the first bytes of a file, which is not deleted.

        The rest of the file is not downloaded for it, where the storage hands out parts.

        Raises:
            ConfigError: If it cannot be read or written.
        """
        path = self.folder / f"{name}.head"
        with _writing(self.folder):
            if not path.exists():
                with claimed(path) as stream:
                    stream.write(self._head(name, size))
                    publish(stream, path)
        return path

    def _head(self, name: str, size: int) -> bytes:
        from litdata.streaming.downloader import Downloader

        if (self.folder / name).exists() or type(self.downloader).download_bytes is Downloader.download_bytes:
            return self.map(name)[:size].tobytes()
        with self._complaining(name):
            return self.downloader.download_bytes(f"{self.url}/{name}", 0, size, "")

    def get(self, name: str, stream: IO[bytes]) -> None:
        """Writes a file's content to a stream.

        Not by `download_file` where there is a choice: on S3 it returns without a word where another process
        downloads the same, refuses endpoints without TLS, and starts threads that do not survive a fork.
        """
        from litdata.streaming.downloader import Downloader

        with self._complaining(name):
            if type(self.downloader).download_fileobj is not Downloader.download_fileobj:
                self.downloader.download_fileobj(f"{self.url}/{name}", stream)
                return
            with tempfile.TemporaryDirectory(dir=self.folder if self.files else None) as folder:
                path = Path(folder, "file")
                self.downloader.download_file(f"{self.url}/{name}", str(path))
                with path.open("rb") as found:
                    shutil.copyfileobj(found, stream)

    @property
    def downloader(self) -> Any:
        """What litdata downloads with from this storage."""
        if self._downloader is None:
            from litdata.streaming.downloader import get_downloader

            options = _for_boto(self.options) if self.url.startswith(("s3://", "r2://")) else self.options
            self._downloader = get_downloader(self.url, str(self.folder), [], options)
        return self._downloader

    def _download(self, name: str, stream: IO[bytes]) -> None:
        told = self.files[name]
        for size in (told["bytes"], 0):  # what was damaged on its way is whole the second time
            stream.truncate(
                size
            )  # others reckon with the room from here on; 0: to find out how much there is
            if size:
                self._make_room()
            stream.seek(0)
            self.get(name, stream)  # in any order: where the stream stands then says nothing
            stream.seek(0)
            if hashlib.file_digest(stream, "sha256").hexdigest() == told["sha256"]:  # type: ignore[arg-type]
                return
        found = stream.seek(0, os.SEEK_END)
        problem = "its content is not what was prepared (SHA-256)"
        if found != told["bytes"]:
            problem = f"it has {found:,} bytes, the manifest says {told['bytes']:,}"
        raise ConfigError(f"{self.url}/{name} is damaged: {problem}. Upload it again.")

    def _make_room(self) -> None:
        """Deletes chunks that nobody has mapped, those asked for longest ago first, until the rest fits."""
        cached = _cached(self.folder.parent)
        excess = sum(size for _, size, _ in cached) - self.limit
        for _, freed, path in cached:
            if excess <= 0:
                return
            with suppress(FileNotFoundError), locked(path, fcntl.LOCK_EX) as stream:
                if stream:
                    path.unlink()
                    excess -= freed

    @contextmanager
    def _complaining(self, name: str) -> Iterator[None]:
        """Makes a ConfigError of whatever the client raises: each has exceptions of its own."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise ConfigError(self._complaint(name, error)) from error

    def _complaint(self, name: str, error: Exception) -> str:
        kind, said = type(error).__name__, " ".join(str(error).split())[:300]
        hint = "Look at data.source, data.storage_options and the network."
        if isinstance(error, ModuleNotFoundError):
            scheme = next(scheme for scheme in SCHEMES if self.url.startswith(scheme))
            hint = f"pip install {_PACKAGES.get(scheme, 'boto3')}"
        elif any(word in kind + said for word in ("redential", "orbidden", "AccessDenied", "(403)", "(401)")):
            hint = (
                "Credentials come from where the storage's own tools look for them (environment, ~/.aws, ...), or "
                "from\ndata.storage_options."
            )
        elif any(word in kind + said for word in ("404", "NotFound", "NoSuch")):
            hint = "There is no such file, or no such bucket." + (
                f" What `python -m core prepare` wrote to its end has a {MANIFEST};\nupload it last."
                if name == MANIFEST
                else " Upload it again."
            )
        return f"{self.url}/{name} cannot be read: {kind}: {said}\n{hint}"


def _for_boto(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options with which boto3 gives up after a minute or two; litdata's defaults try for hours."""
    from botocore.config import Config

    given = {
        "retries": {"max_attempts": 6, "mode": "standard"},
        "connect_timeout": 10,
        "max_pool_connections": 32,
    }
    return options | {"config": Config(**(given | dict(options.get("config") or {})))}


def _cached(root: Path) -> list[tuple[int, int, Path]]:
    """Returns (when it was last asked for, bytes, path) of all chunks, also those under way; the oldest first."""
    found = {}
    # those under way first, to the end: one that takes its name meanwhile is found twice rather than never
    for pattern in ("*/*/*.bin.tmp", "*/*/*.bin"):
        for path in root.glob(pattern):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[str(path).removesuffix(".tmp")] = (status.st_mtime_ns, status.st_size, path)
    return sorted(found.values())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}.\nRemote data is kept in data.cache_dir, which "
            "must be writable, with room for data.cache_bytes."
        ) from error
