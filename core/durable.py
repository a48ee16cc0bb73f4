"""Writes files so that after a crash a file is there completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

__all__ = ["replacing", "sync", "sync_all", "write", "write_error"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name to write a file under; then flushes it to the disk and gives it its own name.

    A reader sees the old or the new content, never a part. What was written is removed where the body fails.

    Raises:
        OSError: With the name of the file, which the system leaves out where there is no space left.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")  # not the pid: machines may share it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def write(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_error(error: OSError) -> str:
    """Returns why a file could not be written; of a write that stopped short numpy gives no reason."""
    if error.errno is not None or "requested and" not in str(error):
        return error.strerror or str(error)
    return f"{os.strerror(errno.ENOSPC)}, or {os.strerror(errno.EFBIG)} ({error})"


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(folder: Path) -> None:
    """Flushes a folder and everything below it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
