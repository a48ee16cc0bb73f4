"""Files that many processes and threads write once and read: who writes, who reads, who may delete.

The kernel keeps the locks, and ends them with the process that holds them. Each belongs to one opening of a file.
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


@contextmanager
def claimed(path: Path) -> Iterator[IO[bytes]]:
    """Yields an empty file that takes the name `path` later; waits for whoever else is writing it."""
    path = path.with_name(f"{path.name}.tmp")
    while True:
        with locked(path, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT) as stream:
            if stream and _is(path, stream):  # else somebody is writing it, or has given it its name
                stream.truncate(0)  # what a killed process left
                try:
                    yield stream
                finally:
                    if _is(path, stream):
                        path.unlink()
                return
        time.sleep(0.02)  # not in the kernel: under its new name the file may be locked for long


def _is(path: Path, stream: IO[bytes]) -> bool:
    """Returns whether an open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    return False


@contextmanager
def locked(path: Path, how: int, flags: int = os.O_RDONLY) -> Iterator[IO[bytes] | None]:
    """Opens a file and locks it until it is closed; yields None if another opening of it is in the way.

    Also of this process: a lock belongs to the opening, and to what was mapped from it.
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


def _let_go() -> None:
    """Gives up, in a forked process, its copies of other threads' locks, which would never end."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in _locks:
        os.dup2(null, handle)  # not closed: somebody still believes to have a file of this number
    os.close(null)
    _locks.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go)


def publish(stream: IO[bytes], path: Path) -> None:
    """Gives a claimed file its name, once its content is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
    os.replace(f"{path}.tmp", path)
