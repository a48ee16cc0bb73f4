"""Ownership of run folders: a lock file names the job, and the machine and process that writes to the folder.

The claim of a process of this machine that has ended is taken over. Whether a process of another machine is running
cannot be determined: a message asks the user to delete the file. A claim without content, such as an empty file, prevents
a new run from using the folder, but not a resumed one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from core import durable
from core.errors import ConfigError
from toolkit.holders import Holder, alive, myself

CLAIM = ".claimed"
"""The lock file. It exists while a run owns the folder, and holds the fields of :class:`Holder` as JSON."""


def read_claim(folder: Path) -> Holder | None:
    """Returns the owner of a folder; None if it has no claim."""
    try:
        text = (folder / CLAIM).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Holder() if (folder / CLAIM).exists() else None
    try:
        found = json.loads(text)
        return Holder(**found) if isinstance(found, dict) else Holder()
    except (ValueError, TypeError):
        return Holder(job=text or None)  # the format of earlier versions: the job alone


def write_claim(folder: Path, holder: Holder) -> None:
    """Writes a claim. The modification time of the file is when the folder became the job's.

    Raises:
        ConfigError: If the file cannot be written.
    """
    path, before = folder / CLAIM, read_claim(folder)
    try:
        times = path.stat() if before and holder.job and before.job == holder.job else None
        durable.write(path, json.dumps(asdict(holder)))  # atomically: another rank may be reading it
        if times is not None:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    except OSError as error:
        raise unmakeable(folder, error) from error


def take_claim(folder: Path, job: str | None) -> None:
    """Claims the folder of a run that is resumed.

    Raises:
        ConfigError: If another run uses it, or may use it; or if the claim cannot be written.
    """
    with _one_at_a_time(folder):
        holder, here = read_claim(folder), myself(job)
        if holder is not None and replace(holder, job=job) != here:
            _refuse_if_held(folder, holder, job)
        write_claim(folder, here)


def _refuse_if_held(folder: Path, holder: Holder, job: str | None) -> None:
    running = alive(holder)
    who = f"process {holder.process} on {holder.host}"
    if running:
        raise ConfigError(
            f"The run folder {folder} is in use: {who} writes to it.\n"
            "Wait until that process ends, or resume in another folder: --trainer.default_root_dir=FOLDER."
        )
    if running is None and not (
        job and holder.job == job
    ):  # the launcher has ended the processes of the earlier start
        raise ConfigError(
            f"The run folder {folder} is claimed by {who}; whether that process runs cannot be seen from this machine.\n"
            f"If it has ended, delete {folder / CLAIM} and start again. Else resume in another folder:\n"
            "--trainer.default_root_dir=FOLDER."
        )


def leave(folder: Path, keep_job: bool) -> None:
    """Releases this process's claim, unless another process has taken the folder over.

    Args:
        folder: The folder.
        keep_job: Whether the folder stays the job's, because the launcher may restart it.
    """
    holder = read_claim(folder)
    if holder is None or (holder.host and replace(holder, job=None) != myself()):
        return
    with suppress(OSError, ConfigError):
        if keep_job:
            write_claim(folder, Holder(job=holder.job))
        else:
            (folder / CLAIM).unlink()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, so that two processes of this machine do not read and write its claim at once."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unmakeable(folder, error) from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def unmakeable(folder: Path, error: OSError) -> ConfigError:
    """Returns the error for a run folder that cannot be created or written."""
    return ConfigError(
        f"The run folder {folder} cannot be made: {error.strerror}. Set --trainer.default_root_dir."
    )
