"""A disk without room, and somebody who ends the wait for it or makes room."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes: the failing write is like that on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def room_after(seconds: float) -> Iterator[None]:
    """Takes the limit away while the body runs."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (hard, hard)))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def signalled(number: int = signal.SIGTERM, every: float = 0.3) -> Iterator[None]:
    """Sends this process a signal again and again while the body runs; SIGTERM has no effect of its own."""
    over = threading.Event()
    before = signal.getsignal(number)
    if number == signal.SIGTERM:
        signal.signal(number, lambda *_: None)

    def send() -> None:
        while not over.wait(every):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(number, before)
