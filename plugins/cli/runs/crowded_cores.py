"""Whether other programs compute on this machine's cores as a run starts, and how its threads then wait."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

SAMPLES, PAUSE_SECONDS = 5, 0.01
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user has decided how threads wait."""


def share_cores(
    environ: MutableMapping[str, str] = os.environ, running: Callable[[], int] | None = None
) -> str:
    """Lets OpenMP's threads sleep, not spin, while they wait for each other on cores that are crowded.

    A thread that spins keeps its core from the thread that it waits for, which is behind another program: on two cores
    with a second program, steps took 1.6 times as long. On free cores spinning is faster, 1.25 times, so it stays there. OpenMP reads
    the setting once, as torch is imported: nothing is done after that, with one thread, or where the user has decided. Nor is
    it where the process may use a part of the machine's cores: the kernel does not say how many threads run on those.

    Args:
        environ: The environment of this process, in which the setting is put.
        running: Returns how many threads run on the machine, this one among them; None: as the kernel says.

    Returns:
        A line for the user; empty where nothing was done.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = environ.get("OMP_NUM_THREADS", str(cores))
    if "torch" in sys.modules or threads == "1" or any(name in environ for name in SETTINGS):
        return ""
    if cores < (os.cpu_count() or cores):
        return ""
    try:
        others = _others(running or _running)
    except (OSError, ValueError):  # no Linux
        return ""
    if not others or others + (int(threads) if threads.isdecimal() else cores) <= cores:
        return ""
    environ["OMP_WAIT_POLICY"] = "passive"
    return f"{others} other threads compute on these {cores} cores: those of this run sleep while they wait"


def _others(running: Callable[[], int]) -> int:
    """Returns the median over a few moments, so that a program that wakes now and then does not count."""
    seen = []
    for _ in range(SAMPLES):
        seen.append(running() - 1)
        time.sleep(PAUSE_SECONDS)
    return int(statistics.median(seen))


def _running() -> int:
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
