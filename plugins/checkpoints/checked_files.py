"""Files of a folder that have to be as a manifest says: of that size and SHA-256, and regular."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.checkpoints import schema

MANIFEST = "manifest.json"

Files = Mapping[str, Mapping[str, Any]]
"""Name -> size in bytes and SHA-256 of each file, by the manifest."""


class Damage(Exception):
    """Why a folder is not a complete, undamaged checkpoint."""


def checksum(path: Path) -> dict[str, Any]:
    """Returns the size of a file in bytes, and its SHA-256."""
    with open(path, "rb") as file:
        return sums_of(path.stat().st_size, hashlib.file_digest(file, "sha256"))


def sums_of(size: int, digest: Any) -> dict[str, Any]:
    """Returns what a manifest says of a file of this size, in bytes, and this hash of `hashlib`."""
    return {"bytes": size, "sha256": digest.hexdigest()}


def check(folder: Path, name: str, files: Files) -> int:
    """Compares a file with its size and checksum; returns its modification time.

    Raises:
        Damage: If it is another file, or none.
    """
    found = _regular(folder, name)
    if found.st_size != files[name]["bytes"] or _checksum(folder / name, found) != files[name]:
        raise Damage(f"{name} is damaged")
    return found.st_mtime_ns


def read_checked(folder: Path, name: str, files: Files) -> bytes:
    """Returns the content of a small file: the bytes that were compared with their checksum.

    Raises:
        Damage: If it is another file, or none.
    """
    if name not in files:
        raise Damage(f"{MANIFEST} names no {name}")
    if _regular(folder, name).st_size != files[name]["bytes"]:
        raise Damage(f"{name} is damaged")
    found = (folder / name).read_bytes()
    if hashlib.sha256(found).hexdigest() != files[name]["sha256"]:
        raise Damage(f"{name} is damaged")
    return found


def _regular(folder: Path, name: str) -> os.stat_result:
    try:
        found = (folder / name).lstat()
    except FileNotFoundError:
        raise Damage(f"{name} is missing") from None
    if stat.S_ISLNK(found.st_mode):
        raise Damage(f"{MANIFEST} names {name}, which is not in the folder")
    if not stat.S_ISREG(found.st_mode):
        raise Damage(f"{name} is not a regular file")
    return found


_known: dict[tuple[int, ...], dict[str, Any]] = {}


def _checksum(path: Path, found: os.stat_result) -> dict[str, Any]:
    """Returns the checksum of a file; a run checks its checkpoint before it loads it, and reads it once."""
    key, settled = schema.identity(found), schema.is_settled(found)
    if key not in _known:
        result = checksum(path)
        if not settled:
            return result
        _known[key] = result
    return _known[key]
