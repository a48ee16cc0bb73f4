"""Locks on files that many processes and threads share: each file is written once, read, and deleted later.

The locks are flock locks of the kernel: they belong to an open file, and are released when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["claimed", "locked", "publish"]


@contextmanager
def claimed(path: Path) -> Iterator[IO[bytes]]:
    """Yields an empty temporary file for `path`; waits while another process or thread writes it."""
    path = path.with_name(f"{path.name}.tmp")
    while True:
        with locked(path, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT) as stream:
            if stream and _is(path, stream):  # otherwise it is being written, or was renamed to `path`
                stream.truncate(0)  # the remains of a killed process
                try:
                    yield stream
                finally:
                    if _is(path, stream):
                        path.unlink()
                return
        time.sleep(0.02)  # polled: after the rename, readers may hold the lock for long


def _is(path: Path, stream: IO[bytes]) -> bool:
    """Returns whether an open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    return False


@contextmanager
def locked(path: Path, how: int, flags: int = os.O_RDONLY) -> Iterator[IO[bytes] | None]:
    """Opens a file and locks it until it is closed; yields None if a conflicting lock is held.

    That includes locks of this process: a lock belongs to the open file, and to what was mapped from it.
    """
    with _opening:
        handle = os.open(path, flags, 0o644)
        _locks.add(handle)
    try:
        with os.fdopen(handle, "r+b" if flags & os.O_RDWR else "rb", closefd=False) as stream:
            yield stream if _lock(handle, how) else None
    finally:
        with _opening:
            os.close(handle)
            _locks.discard(handle)


def _lock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_opening, _locks = threading.Lock(), set[int]()


def _release_in_child() -> None:
    """Releases a forked process's copies of the locks of other threads, which would be held until it ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in _locks:
        os.dup2(null, handle)  # not closed: the number could be reused while it is still in use
    os.close(null)
    _locks.clear()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_release_in_child
)


def publish(stream: IO[bytes], path: Path) -> None:
    """Renames a claimed file to `path` after its content is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
    os.replace(f"{path}.tmp", path)
