"""Which process writes to a folder, and whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Holder", "alive", "myself", "start_of"]


@dataclass(frozen=True)
class Holder:
    """The job and process that write to a folder.

    Attributes:
        job: Name of the job from :func:`plugins.cli.runs.restarts.job`; None without a launcher.
        host: Name of the machine; "" if no process holds the folder, as between two starts of a job.
        process: Process id.
        started: Start time of the process in clock ticks since boot: process ids are reused.
        space: PID namespace: each container has its own process ids.
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
    """Returns the start time of a process; "-" if it has ended, or without /proc."""
    try:
        state, *others = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-"
    # A zombie has ended, and its parent has not waited for it yet.
    return "-" if state in "ZX" else others[18]


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def alive(holder: Holder) -> bool | None:
    """Returns whether a holder's process is running; None if it is on another machine or in another container."""
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
