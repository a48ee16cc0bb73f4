"""Reads files out of tar and zip archives in memory; nothing is unpacked, no link is followed, bombs are stopped."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from datamodules.preparation.readers.compressed_files import BrokenFileError, codec_of, decompressed
from datamodules.preparation.readers.opened_files import opened, printable

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2")

_LONGEST_HEADER, _MOST_FIELDS = 1 << 20, 1000
_SMALL, _RATIO = 1 << 26, 1000
_BAD_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def is_archive(path: Path) -> bool:
    """Returns whether a file is an archive, by its name."""
    return path.name.lower().endswith(SUFFIXES)


def archived_files(path: Path, limit: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yields the path and the content of each regular file of an archive that is wanted.

    Args:
        path: A .zip or .tar file; .tar also compressed.
        limit: Longest content in bytes; of longer ones the first `limit` + 1 bytes are read.
        wanted: Called with the path in the archive, which has only names of folders and a file.

    Raises:
        BrokenFileError: If the archive cannot be read further, or is a bomb.
    """
    read = _zipped if path.suffix.lower() == ".zip" else _tarred
    with opened(path) as raw:
        yield from read(path, raw, limit, wanted)


def safe_path(name: str) -> str:
    """Returns a path of an archive in its usual form; empty if it is absolute or leads out."""
    path = PurePosixPath(printable(name.replace("\\", "/")))
    return "" if path.is_absolute() or ".." in path.parts or ":" in path.parts[:1] else path.as_posix()


def _zipped(path: Path, raw: Any, limit: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    size, done = os.fstat(raw.fileno()).st_size, 0
    try:
        with zipfile.ZipFile(raw) as archive:
            for entry in archive.infolist():
                name, mode = safe_path(entry.filename), entry.external_attr >> 16
                if entry.is_dir() or stat.S_ISLNK(mode) or not name or not wanted(name):
                    continue
                with archive.open(entry) as file:
                    content = file.read(limit + 1)
                done += len(content)
                if done > max(_SMALL, _RATIO * size):
                    raise BrokenFileError("a zip bomb", f"{size:,} bytes become more than {done:,}", size)
                yield name, content
    except _BAD_ZIP as error:
        raise BrokenFileError("broken zip file", str(error)[:200], size) from error


def _tarred(path: Path, raw: Any, limit: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    codec = "gzip" if path.suffix.lower() == ".tgz" else codec_of(path)
    stream = io.BufferedReader(_Blocks(decompressed(path, codec)), 1 << 18) if codec else raw
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps all of them otherwise
                name = safe_path(member.name)
                if member.isreg() and name and wanted(name):
                    file: Any = archive.extractfile(member)
                    yield name, file.read(limit + 1)
    except (tarfile.TarError, EOFError, OverflowError, RecursionError, ValueError) as error:
        size = os.fstat(raw.fileno()).st_size
        raise BrokenFileError("broken tar file", str(error)[:200], size) from error


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class _Member(tarfile.TarInfo):
    """A member that raises where `tarfile` takes damage for the end, and before it reads a long header into memory."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)  # type: ignore[return-value]
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"byte {archive.offset:,}: {error}") from error  # type: ignore[attr-defined]

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if not self.isreg() and self.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE or len(archive.pax_headers) > _MOST_FIELDS:
            raise tarfile.ReadError("a sparse file, or too many fields")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_gnusparse_10(self, *_: Any) -> None:
        raise tarfile.ReadError("a sparse file")
