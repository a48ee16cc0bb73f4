"""Reads files that may be damaged or hostile: regular files inside a folder, of bounded size; strict JSON."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import IO, Any

__all__ = [
    "MOST_BYTES",
    "MOST_TABLE_BYTES",
    "open_inside",
    "parse_json",
    "plain_path",
    "read_error",
    "read_inside",
]

MOST_BYTES = 1 << 28
"""Limit of a file that is read completely: enough for an index or manifest of some million shards."""

_PIECE_BYTES = 1 << 20

MOST_VALUES = 1 << 24
"""Limit of values in JSON: a few bytes of it can become some hundred in memory."""

MOST_TABLE_BYTES = 1 << 30
"""Limit of a table of a run's figures, which grows by a row each time that something is logged."""

DEPTH = 64
"""Limit of nested lists and objects in JSON."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def plain_path(name: Any) -> bool:
    """Returns whether a name is a path of plain names below a folder: relative, without "..", printable."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or len(name) > 1024:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) < 256 for part in name.split("/"))


def open_inside(folder: Path, name: str) -> IO[bytes]:
    """Opens a regular file inside a folder for reading; never waits for a pipe, and opens no device.

    The folder itself may be a symbolic link, and so may what is in it as long as it stays inside.

    Raises:
        OSError: If it is not there or cannot be read.
        ValueError: If it is no regular file, or outside of the folder.
    """
    path = folder / name
    require_inside(folder, name)
    _require_regular(path.stat())
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(handle))  # it may have been replaced meanwhile
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_inside(folder: Path, name: str) -> None:
    """Raises a ValueError where a name below a folder leads out of it, by "..", as an absolute path or over links."""
    if not plain_path(name):
        raise ValueError(f"{ascii(name)[:80]} is no path inside the folder")
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            if not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder)):
                raise ValueError(
                    "a symbolic link leads out of the folder; copy the folder with what it links to (cp -rL)"
                )
            return


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a regular file"
        )


def read_inside(folder: Path, name: str) -> bytes:
    """Returns the content of a regular file inside a folder.

    Raises:
        OSError: If it is not there or cannot be read.
        ValueError: If it is no regular file, outside of the folder, or has more than `MOST_BYTES`.
    """
    with open_inside(folder, name) as stream:
        pieces, size = [], os.fstat(stream.fileno()).st_size
        # Piece by piece: some file systems say 0 of what has no end, and `read(n)` reserves n bytes at once.
        while size <= MOST_BYTES and (piece := stream.read(_PIECE_BYTES)):
            pieces.append(piece)
            size = max(size, sum(map(len, pieces)))
    if size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    return b"".join(pieces)


def read_error(error: OSError | ValueError) -> str:
    """Returns why a file could not be read, without its name."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def parse_json(content: bytes, unique: bool = True) -> Any:
    """Returns what JSON in UTF-8 holds.

    Args:
        content: The JSON.
        unique: Whether an object may have each key only once.

    Raises:
        ValueError: If it is none, too large or too deep, or has NaN, infinities or a key twice.
    """
    if len(content) > MOST_BYTES or sum(map(content.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise ValueError("it is too large")
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_unique if unique else None,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON in UTF-8: {error}") from None
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, dict | list)
        for inner in (outer.values() if isinstance(outer, dict) else outer)
        if isinstance(inner, dict | list)
    ]:
        if (depth := depth + 1) >= DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"it has the key {ascii(twice)[:80]} twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number in JSON")
    return value
