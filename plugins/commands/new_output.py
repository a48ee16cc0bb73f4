"""Files and folders that a command writes: complete or not there at all, also where the command is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from core import durable
from core.errors import ConfigError

LONGEST_SUFFIX = "." * 18
"""What a temporary name is longer by: see `core.durable.replacing`."""


def check_writable(name: str, option: str = "--output") -> None:
    """Raises a ConfigError if a file or folder of a name cannot be written; leaves nothing behind.

    Folders that are missing are no fault: they are made when it is written.
    """
    try:
        path = Path(name).absolute()
        path.with_name(path.name + LONGEST_SUFFIX).exists()
        folder = next(parent for parent in path.parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # a NUL in the name, or one that is too long
        reason = (durable.write_error(error) if isinstance(error, OSError) else str(error)).rstrip(".")
        raise ConfigError(f"{option} {name[:200]} cannot be written: {reason}.") from error


def check_new(output: Path) -> None:
    """Raises a ConfigError if something is there already, or a file or folder cannot be written there."""
    check_writable(str(output))
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists already: give another name.")


@contextmanager
def new_output(output: Path) -> Iterator[Path]:
    """Yields a path to write a file or folder to, which then gets its own name; where the body ends early, nothing stays.

    The path is in a temporary folder beside. Folders above are made, and removed with it.

    Raises:
        ConfigError: If it cannot be written.
    """
    made = [folder for folder in output.absolute().parents if not folder.exists()]
    temporary = output.with_name(f".{output.name}.{uuid4().hex[:12]}.tmp")
    try:
        temporary.mkdir(parents=True)
        written = temporary / output.name
        yield written
        if written.is_dir():
            durable.sync_all(written)
        else:
            durable.sync(written)
        os.rename(written, output)
        durable.sync(output.parent)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {durable.write_error(error)}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # it has the output
                folder.rmdir()


@contextmanager
def interruptible(wait: bool = False) -> Iterator[Callable[[], None]]:
    """Lets SIGTERM and SIGHUP raise an exception in the body, as Ctrl-C does, so that what is unfinished is removed.

    Further signals are ignored until the body has ended. Signals that are ignored stay so, as SIGINT in background jobs.

    Args:
        wait: Whether a signal has to wait for the next call of the function that is yielded, or the end of the body:
            an exception inside torch's writer would abort the process.
    """
    received: list[int] = []

    def check() -> None:
        if received and not raised:
            raised.append(True)
            raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if not wait:
            check()

    raised: list[bool] = []
    numbers = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            n: signal.signal(n, note) for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)
        }
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    check()
