"""Opens files safely: named pipes, devices and names that are not UTF-8 are handled."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from core.errors import ConfigError

LONGEST = 1 << 28
"""Bytes of the longest document, line or file, that is read; encoding takes some 40 times as much memory."""


class UnreadableError(ConfigError):
    """A file that cannot be opened; `reason` is one of a few fixed texts, to count by."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{printable(str(path))} cannot be read: {reason}.")
        self.reason = reason


def opened(path: Path) -> Any:
    """Opens a file for reading bytes.

    Raises:
        UnreadableError: If it cannot be opened or is not a regular file. Opening a named pipe would block.
    """
    try:
        stream = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115
    except OSError as error:
        raise UnreadableError(path, str(error.strerror)) from error
    if kind := kind_of(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise UnreadableError(path, kind)
    return stream


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def kind_of(mode: int) -> str:
    """Returns what kind of thing a mode describes if it is not a regular file; empty for a regular file."""
    kinds = {
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
        stat.S_ISSOCK: "a socket",
        stat.S_ISDIR: "a folder",
    }
    return "" if stat.S_ISREG(mode) else next((kind for test, kind in kinds.items() if test(mode)), "no file")


def printable(name: str) -> str:
    r"""Returns a file's name with escapes such as `\xe9` for bytes that are not UTF-8: JSON cannot store those."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def unstorable(text: str) -> str:
    """Returns why a text cannot be stored as UTF-8; empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is half of a surrogate pair"
    return ""
