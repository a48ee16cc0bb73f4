"""Checks a checkpoint once for all ranks: a folder in shares, a single file by the first rank; all get the verdict.

Before the ranks are connected, each looks only at the parts of a checkpoint that it reads itself, so that all of them
find the same one. What is found damaged later is noted beside it: the next start finds the one before.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from core import durable
from core.errors import ConfigError
from plugins.checkpoints import remote_copies, schema, sharded
from plugins.checkpoints.checked_files import MANIFEST, Damage


def agreed(path: Path) -> Path:
    """Returns the first rank's path, which may have skipped a damaged checkpoint; called on every rank."""
    return provided(remote_copies.here(Path(_broadcast(str(path)))) if _ranks() > 1 else path)


def provided(path: Path) -> Path:
    """Returns the path of a checkpoint, which is copied to this machine first if it is on object storage.

    Raises:
        ConfigError: If that fails.
    """
    if reason := remote_copies.provide(path):
        raise ConfigError(f"{remote_copies.shown(path)}: {reason}. Resume from another: --ckpt_path URL.")
    return path


def check(folder: Path) -> sharded.Opened:
    """Reads this rank's share of the files of a sharded checkpoint; called on every rank.

    Raises:
        ConfigError: On every rank, if one of them found a file damaged, or they read different folders.
    """
    if (ranks := _ranks()) == 1:
        return sharded.opened_or_refused(folder)
    source, reason = None, None
    try:
        source = sharded.opened(folder, slice(dist.get_rank(), None, ranks))
    except (Damage, OSError) as error:
        reason = str(error)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (reason, source and source.digest, source.newest_ns if source else 0))
    if source is None or any(reason for reason, _, _ in found):
        _refuse(folder, next(reason for reason, _, _ in found if reason))
    if len({digest for _, digest, _ in found}) > 1:
        raise ConfigError(
            f"{folder} is not the same folder on all ranks: all of them have to read the same disk."
        )
    return source.changed_until(max(newest for _, _, newest in found))


def check_file(path: Path) -> None:
    """Checks a single file; called on every rank, of which the first reads it.

    Another rank reads it too where it is not the same file, but a copy on the disk of that machine.

    Raises:
        ConfigError: On every rank, if one of them found it damaged.
    """
    if (ranks := _ranks()) == 1:
        if reason := schema.file_defect(path):
            raise ConfigError(f"{path}: {reason}. --ckpt_path last finds the newest complete checkpoint.")
        return
    first = dist.get_rank() == 0
    reason = schema.file_defect(path) if first else None
    reason, content = _broadcast((reason, content_of(path)))
    if reason is None and not first and content_of(path) != content:
        reason = schema.file_defect(path)
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, reason)
    if told := next(filter(None, found), None):
        _refuse(path, told)


def content_of(path: Path) -> list[int] | None:
    """Returns size and modification time of a file, the same on all machines that mount its disk; None: there is none."""
    with suppress(OSError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return None


def note_of(path: Path) -> Path:
    """Returns the file beside a single-file checkpoint that says why it was refused."""
    return path.with_name(f"{path.name}.damaged")


def noted(path: Path) -> str | None:
    """Returns why ranks refused a single file when they read it together, if it is still that file."""
    try:
        with open(note_of(path), encoding="utf-8") as file:
            content, reason = json.loads(file.read(4096))
    except (OSError, ValueError, TypeError):  # there is none, or it is no note
        return None
    return str(reason)[:1000] if content == content_of(path) else None


def _refuse(path: Path, reason: str) -> NoReturn:
    """Raises the ConfigError on every rank; the first one notes the reason, and looks for the checkpoint before."""
    advice = ""
    if dist.get_rank() == 0:
        with suppress(OSError):  # the folder may belong to another user
            if path.is_dir():
                durable.write(path / sharded.DAMAGED, reason)
            else:
                durable.write(note_of(path), json.dumps([content_of(path), reason]))
        advice = _before(path)
    raise ConfigError(f"{path}: {reason}.\n{_broadcast(advice)}")


def _before(path: Path) -> str:
    ages = {}
    for other in path.parent.glob("*.ckpt"):
        with suppress(OSError):  # a link to nothing: the other ranks wait for what is said here
            ages[other.stat().st_mtime_ns] = other
    # Not the time of a folder, which has changed with the reason that was saved there.
    file = path / MANIFEST if path.is_dir() else path
    written = file.stat().st_mtime_ns if file.exists() else 0
    before = [age for age in sorted(ages) if age < written and ages[age] != path]
    if not before:
        return "There is none before it."
    return f"Resume from the one before: --ckpt_path {ages[before[-1]]}"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _broadcast(value: Any) -> Any:
    objects = [value]
    dist.broadcast_object_list(objects)
    return objects[0]
