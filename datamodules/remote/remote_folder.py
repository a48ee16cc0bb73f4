"""Prepared folders on object storage, read through a cache of limited size on this machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from core.errors import ConfigError
from datamodules.packing.mapped_file import MappedFile
from toolkit import manifest_schema
from toolkit.bounded import MOST_BYTES, open_inside, read_error
from toolkit.file_claims import claimed, locked, publish
from toolkit.prepared import MANIFEST, SCHEMES, is_edited
from toolkit.ranks import launched_rank
from toolkit.sizes import readable

_INDICES = ("train/index.json", "validation/index.json", "test/index.json")
_FIRST = ("tokenizer.json", *_INDICES[:2])
"""What every folder has, and is downloaded at once, with the index of a test split where there is one."""

_PACKAGES = {"gs://": "google-cloud-storage", "azure://": "azure-storage-blob", "hf://": "huggingface_hub"}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MORE = 1 << 20
"""Bytes downloaded beyond the expected size, so that a message can state the actual size."""
_opened: dict[Path, RemoteFolder] = {}


def remote_of(folder: Path) -> RemoteFolder | None:
    """Returns the remote folder of a local copy, if this process has opened it."""
    return _opened.get(folder)


def register(remote: RemoteFolder) -> None:
    """Makes an opened folder known to the token stores of this process, by its local copy."""
    _opened[remote.folder] = remote


def room(root: Path) -> int:
    """Returns three quarters of what the disk of a cache has room for, in bytes, what is cached included."""
    kept = sum(size for _, size, _ in _cached(root))
    return (shutil.disk_usage(root).free + kept) * 3 // 4


def open_remote(
    url: str, cache_dir: Path, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
) -> Path:
    """Downloads the manifest, tokenizer and indices of a prepared folder; chunks are downloaded when they are read.

    Args:
        url: The folder.
        cache_dir: Holds the local copy under `remote/`, named by a hash of the manifest: changed data gets a new copy.
        cache_bytes: Most bytes of chunks to keep, of all remote folders together; None: three quarters of the
            free space on the disk.
        storage_options: Options of the storage's client, such as `endpoint_url`.

    Returns:
        The local copy, which holds manifest.json, tokenizer.json and the index.json of each split.

    Raises:
        ConfigError: If it cannot be read, is not a prepared folder, or the cache cannot be written.
    """
    if cache_bytes is not None and cache_bytes < 1:
        raise ConfigError(f"data.cache_bytes is {cache_bytes}; it must be at least 1.")
    root = cache_dir / "remote"
    remote = RemoteFolder(url.rstrip("/"), root, 0, dict(storage_options or {}))
    content = io.BytesIO()
    remote.get(MANIFEST, AtMost(content, MOST_BYTES))
    remote.files = _listed(remote.url, content.getvalue())
    remote.folder = root / hashlib.sha256(content.getvalue()).hexdigest()[:16]
    first = dict.fromkeys((*_FIRST, *(name for name in _INDICES if name in remote.files)))
    with writing(root):
        for name in first:
            (remote.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with claimed(remote.folder / MANIFEST) as stream:
            stream.write(content.getvalue())
            publish(stream, remote.folder / MANIFEST)
        remote.limit = cache_bytes or room(root)
    for name in first:
        remote.fetch(name)
    register(remote)
    size = sum(expected["bytes"] for name, expected in remote.files.items() if name not in first)
    if size > remote.limit and launched_rank() in (None, 0):
        print(
            f"{remote.url} has {readable(size)} of shards, the cache {readable(remote.limit)} "
            "(data.cache_bytes): shuffled rows will cost up to a download each.",
            file=sys.stderr,
        )
    return remote.folder


def _listed(url: str, content: bytes) -> dict[str, dict[str, Any]]:
    """Returns name -> size and SHA-256 of the files in a manifest."""
    try:
        manifest = manifest_schema.parsed(content)
        if is_edited(manifest):
            raise ValueError("its figures are not those that prepare wrote (SHA-256)")
        files = manifest.get("files", {})
        if missing := [name for name in _FIRST if name not in files]:
            raise ValueError(f"it does not describe {missing[0]}")
    except ValueError as error:
        raise ConfigError(f"{url}/{MANIFEST} is damaged: {error}. Upload it again.") from error
    return files


class AtMost(io.RawIOBase):
    """Forwards writes to a stream up to a limit: a storage may send an endless reply."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.limit = stream, limit

    def writable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True: parts come in any order."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seeks in the stream."""
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        """Returns the position in the stream."""
        return self.stream.tell()

    def write(self, content: Any) -> int:
        """Writes the content; raises a ValueError if it exceeds the limit."""
        if self.stream.tell() + memoryview(content).nbytes > self.limit:
            raise ValueError(f"there are more than {self.limit:,} bytes")
        return self.stream.write(content)


@dataclass(eq=False)
class RemoteFolder:
    """A prepared folder on object storage, and its local copy, which caches chunks.

    Any number of processes and threads of a machine share the copy. One of them downloads a chunk, checks its
    SHA-256 and renames it into place. When room is needed, the least recently requested chunks are deleted, unless a
    process has them mapped. Locks of the kernel, which end with the process that holds them, coordinate this;
    the remains of a killed process are overwritten or deleted.

    Chunks that are mapped or being downloaded are kept even if they alone exceed the limit.

    Args:
        url: The folder.
        folder: Its local copy.
        limit: Most bytes of chunks to keep, of all copies in the same parent folder.
        options: Options of the storage's client.
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

    def map(self, name: str) -> MappedFile:
        """Returns a file, memory-mapped; it is not deleted while its bytes are referred to.

        Raises:
            ConfigError: As :meth:`fetch`, and if the local copy has another size than it was downloaded with.
        """
        while True:
            with suppress(FileNotFoundError), locked(self.fetch(name), fcntl.LOCK_SH) as stream:
                if stream and os.fstat(stream.fileno()).st_nlink:  # otherwise it was deleted meanwhile
                    found, expected = os.fstat(stream.fileno()).st_size, self.files[name]["bytes"]
                    if found != expected:
                        raise self.damaged(name, ValueError(f"it has {found:,} bytes, not {expected:,}"))
                    return MappedFile(stream)  # the mapping holds the lock from here on

    def damaged(self, name: str, error: OSError | ValueError) -> ConfigError:
        """Returns what to raise where the local copy of a file cannot be read."""
        return ConfigError(
            f"{self.folder / name} is damaged: {read_error(error)}.\nDelete it and run again: it is downloaded again."
        )

    def fetch(self, name: str) -> Path:
        """Returns the local copy of a file; downloads it if it is missing.

        Raises:
            ConfigError: If it cannot be read or written, or does not match the manifest.
        """
        path = self.folder / name
        with writing(self.folder):
            with suppress(FileNotFoundError):
                os.utime(path)
                return path
            with claimed(path) as stream:
                if not path.exists():  # otherwise another process was first
                    self._download(name, stream)
                    publish(stream, path)
        return path

    def fetch_head(self, name: str, size: int) -> Path:
        """Returns a local copy of the first bytes of a file, which is never deleted.

        Only these bytes are downloaded, if the storage supports range requests.

        Raises:
            ConfigError: If it cannot be read or written.
        """
        path = self.folder / f"{name}.head"
        with writing(self.folder):
            if not path.exists():
                with claimed(path) as stream:
                    stream.write(self._head(name, size))
                    publish(stream, path)
        return path

    def _head(self, name: str, size: int) -> bytes:
        from litdata.streaming.downloader import Downloader

        if (self.folder / name).exists() or type(self.downloader).download_bytes is Downloader.download_bytes:
            return self._mapped_head(name, size)
        with self._explaining(name):
            return self.downloader.download_bytes(f"{self.url}/{name}", 0, size, "")

    def _mapped_head(self, name: str, size: int) -> bytes:
        file = self.map(name)
        try:
            file.require(0, size)
        except OSError as error:
            raise self.damaged(name, error) from error
        return file.raw[:size].tobytes()

    def get(self, name: str, stream: IO[bytes] | io.RawIOBase) -> None:
        """Writes a file's content to a stream.

        Avoids litdata's `download_file` if possible: on S3 it returns silently if another process downloads the
        same file, refuses endpoints without TLS, and starts threads that do not survive a fork.
        """
        from litdata.streaming.downloader import Downloader

        with self._explaining(name):
            if self.url.startswith("local:"):  # the client would block on a pipe, and copy a device
                with open_inside(Path(self.url.removeprefix("local:")), name) as found:
                    shutil.copyfileobj(found, stream)
                return
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
        """Litdata's downloader for this storage."""
        if self._downloader is None:
            from litdata.streaming.downloader import get_downloader

            options = _for_boto(self.options) if self.url.startswith(("s3://", "r2://")) else self.options
            self._downloader = get_downloader(self.url, str(self.folder), [], options)
        return self._downloader

    def _download(self, name: str, stream: IO[bytes]) -> None:
        expected = self.files[name]
        for size in (expected["bytes"], 0):  # a second attempt, in case of damage on the way
            # Reserves the room, which other processes count; 0: to learn the actual size.
            stream.truncate(size)
            if size:
                self._make_room()
            stream.seek(0)
            self.get(name, AtMost(stream, expected["bytes"] + _MORE))
            stream.seek(0)
            if hashlib.file_digest(stream, "sha256").hexdigest() == expected["sha256"]:  # type: ignore[arg-type]
                return
        found = stream.seek(0, os.SEEK_END)
        problem = "its content is not what was prepared (SHA-256)"
        if found != expected["bytes"]:
            problem = f"it has {found:,} bytes, the manifest says {expected['bytes']:,}"
        raise ConfigError(f"{self.url}/{name} is damaged: {problem}. Upload it again.")

    def _make_room(self) -> None:
        """Deletes chunks that no process has mapped, least recently requested first, until the rest fits."""
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
    def _explaining(self, name: str) -> Iterator[None]:
        """Turns any exception of a client into a ConfigError: each client has its own exceptions."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise ConfigError(self._explanation(name, error)) from error

    def _explanation(self, name: str, error: Exception) -> str:
        kind, said = type(error).__name__, " ".join(str(error).split())[:300]
        hint = "Check data.source, data.storage_options and the network."
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
    """Returns options with which boto3 gives up after one or two minutes; litdata's defaults retry for hours."""
    from botocore.config import Config

    given = {
        "retries": {"max_attempts": 6, "mode": "standard"},
        "connect_timeout": 10,
        "max_pool_connections": 32,
    }
    return options | {"config": Config(**(given | dict(options.get("config") or {})))}


def _cached(root: Path) -> list[tuple[int, int, Path]]:
    """Returns (time of the last request, bytes, path) of all chunks, oldest first; includes unfinished downloads."""
    found = {}
    # unfinished ones first: a chunk that is renamed meanwhile is found twice, not missed
    for pattern in ("*/*/*.bin.tmp", "*/*/*.bin"):
        for path in root.glob(pattern):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[str(path).removesuffix(".tmp")] = (status.st_mtime_ns, status.st_size, path)
    return sorted(found.values())


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns errors of a disk into a ConfigError that says what the cache needs."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}.\nRemote data is kept in data.cache_dir, which "
            "must be writable, with room for data.cache_bytes."
        ) from error
