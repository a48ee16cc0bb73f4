"""Folders that a run prepares for itself in a cache: each is there completely or not at all, and is written once."""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from core import durable
from core.errors import ConfigError
from datamodules.preparation.manifest import Totals
from datamodules.preparation.one_preparer import one_preparer

_TEMPORARY = "preparing-"
_STALE_SECONDS = 24 * 3600

Run = Callable[[Path, str], Totals]


def cached_folder(cache_dir: Path, name: str, label: str, transforms: Sequence[str], run: Run) -> Path:
    """Returns a finished folder of the cache; writes it if it is missing.

    Several processes may do this at once, also on several machines: one writes it and the others wait, where they
    share `cache_dir`; see :func:`one_preparer`.

    Args:
        cache_dir: Parent of the folder.
        name: Of the folder: a hash of what determines its content.
        label: Name of the text, for messages.
        transforms: Names of the transforms, for messages.
        run: Writes an empty folder, for a label; returns what it counted.

    Raises:
        ConfigError: If nothing can be written, or `run` raises one.
    """
    folder = cache_dir / name
    if (folder / "manifest.json").exists():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with one_preparer(folder / "manifest.json", label):
            if not (folder / "manifest.json").exists():
                _write(folder, label, transforms, run)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or cache_dir}: {durable.write_error(error)}.\nPrepared data goes to "
            f"data.cache_dir={cache_dir}, which must be writable and have room."
        ) from error
    return folder


def _write(folder: Path, label: str, transforms: Sequence[str], run: Run) -> None:
    begin = time.perf_counter()
    _say(f"Preparing {label}: once, later runs find it in {folder}")
    _remove_stale(folder.parent)
    temporary = folder.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        temporary.mkdir()
        totals = run(temporary, label)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    seconds = time.perf_counter() - begin
    counts = f"{totals.documents:,} documents, {totals.tokens:,} tokens"
    _say(f"Prepared {counts} in {seconds:.1f} s ({totals.shares})")
    if transforms:
        dropped = sum(sum(reasons.values()) for reasons in totals.dropped)
        _say(
            f"Cleaned by {', '.join(transforms)}: {dropped:,} documents dropped. `data.transforms: []` leaves all as they are."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames a finished folder to its name after it is on disk: no process sees an unfinished folder of that name."""
    durable.sync_all(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        # Otherwise another process was first, with the same content.
        if not (folder / "manifest.json").exists():
            raise
    durable.sync(folder.parent)


def _remove_stale(cache_dir: Path) -> None:
    """Removes the remains of killed runs that have not changed for a day."""
    for folder in cache_dir.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # it may be renamed at this moment
            newest = max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])
            if newest < time.time() - _STALE_SECONDS:
                shutil.rmtree(folder)
