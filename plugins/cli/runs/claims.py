"""Whose a run folder is: a file in it names the job, and the machine and process that writes there.

A claim of a process that has died on this machine is taken over. Whether one of another machine is alive is not known
here: the user is asked to delete the file. A claim that says nothing, such as an empty file, keeps a new run away but
not one that goes on with the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from core.errors import ConfigError
from toolkit import durable

CLAIM = ".claimed"
"""A file that is made by the one run that a folder belongs to, as long as it is not over; it names its job."""


@dataclass(frozen=True)
class Holder:
    """Who has claimed a folder.

    Attributes:
        job: What the launcher calls the job; None without a launcher.
        host: The machine; "" where no process holds the folder, as between two starts of a job.
        process: Its process there.
        started: When that began, in the kernel's count: numbers of processes are used again.
        space: In which count of processes, of which each container has its own.
    """

    job: str | None = None
    host: str = ""
    process: int = 0
    started: str = ""
    space: str = ""


def myself(job: str | None = None) -> Holder:
    """Returns this process as a holder."""
    return Holder(job, socket.gethostname(), os.getpid(), start_of(os.getpid()), _space())


def start_of(process: int) -> str:
    """Returns when a process began; "-" if it is over, or where there is no /proc."""
    try:
        state, *others = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-"
    return "-" if state in "ZX" else others[18]  # dead, and its parent has not asked about it yet


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def read_claim(folder: Path) -> Holder | None:
    """Returns who has claimed a folder; None if nobody has."""
    try:
        text = (folder / CLAIM).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Holder() if (folder / CLAIM).exists() else None
    try:
        found = json.loads(text)
        return Holder(**found) if isinstance(found, dict) else Holder()
    except (ValueError, TypeError):
        return Holder(job=text or None)  # as it was written before it named a process


def alive(holder: Holder) -> bool | None:
    """Whether the process that holds a folder goes on; None if that cannot be known here."""
    here = myself()
    if not holder.host:
        return False
    if (holder.host, holder.space) != (here.host, here.space):
        return None
    if here.started != "-":
        return start_of(holder.process) == holder.started
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_claim(folder: Path, holder: Holder) -> None:
    """Notes who holds a folder. The time of the file is that at which it became the job's.

    Raises:
        ConfigError: If that cannot be noted.
    """
    path, before = folder / CLAIM, read_claim(folder)
    try:
        times = path.stat() if before and holder.job and before.job == holder.job else None
        durable.write(path, json.dumps(asdict(holder)))  # whole: another rank may be reading it
        if times is not None:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    except OSError as error:
        raise unmakeable(folder, error) from error


def take_claim(folder: Path, job: str | None) -> None:
    """Claims a folder that a run goes on in.

    Raises:
        ConfigError: If another run is at it, or may be; or if nothing can be written there.
    """
    with _one_at_a_time(folder):
        holder, here = read_claim(folder), myself(job)
        if holder is not None and replace(holder, job=job) != here:
            _refuse_if_held(folder, holder, job)
        write_claim(folder, here)


def _refuse_if_held(folder: Path, holder: Holder, job: str | None) -> None:
    going_on = alive(holder)
    who = f"process {holder.process} on {holder.host}"
    if going_on:
        raise ConfigError(
            f"The run folder {folder} is in use: {who} goes on with it.\n"
            "Wait until that is over, or go on in a folder of its own: --trainer.default_root_dir=FOLDER."
        )
    if going_on is None and not (job and holder.job == job):  # its launcher has ended what it started before
        raise ConfigError(
            f"The run folder {folder} is claimed by {who}, of which this machine cannot know whether it goes on.\n"
            f"If it is gone, delete {folder / CLAIM} and start again. Else go on in a folder of its own:\n"
            "--trainer.default_root_dir=FOLDER."
        )


def leave(folder: Path, keep_job: bool) -> None:
    """Ends this process's claim, if it has not become another's.

    Args:
        folder: The folder.
        keep_job: Whether it stays the job's, which its launcher may start again.
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
    """Lets no two processes of this machine look at a claim and write theirs in the same moment."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unmakeable(folder, error) from error
    try:
        with suppress(OSError):  # a disk that knows no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def unmakeable(folder: Path, error: OSError) -> ConfigError:
    """Returns what to say of a run folder that cannot be written."""
    return ConfigError(
        f"The run folder {folder} cannot be made: {error.strerror}. Set --trainer.default_root_dir."
    )
