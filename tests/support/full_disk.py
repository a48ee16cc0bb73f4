"""A disk without room, and somebody who ends the wait for it or makes room."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plugins.checkpoints.patience import Patience


def is_waited_for() -> bool:
    """Returns whether a thread of this process waits for room."""
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        if frame.f_code is Patience.wait.__code__:
            return True
        if frame.f_back is not None:
            frames.append(frame.f_back)
    return False


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes: the failing write is like that on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it would be cut off, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = bytecode


@contextmanager
def room_once_it_waits() -> Iterator[None]:
    """Takes the limit away as soon as the body waits for that."""
    over, hard = threading.Event(), resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def make_room() -> None:
        while not over.wait(0.01):
            if is_waited_for():
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                return

    thread = threading.Thread(target=make_room)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def signalled(number: int = signal.SIGTERM) -> Iterator[None]:
    """Sends this process a signal again and again while the body waits for room; SIGTERM has no effect of its own."""
    over = threading.Event()
    before = signal.getsignal(number)
    if number == signal.SIGTERM:
        signal.signal(number, lambda *_: None)

    def send() -> None:
        while not over.wait(0.1):
            if is_waited_for():
                os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(number, before)


@contextmanager
def small_disk(folder: Path, size: int | str) -> Iterator[Path]:
    """Mounts a disk at a folder, made where it is not there; skips the test where mounting is not permitted.

    Args:
        folder: Where it is mounted.
        size: In bytes, or with a unit as mount takes it, such as 40k.
    """
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
