"""Running out of memory: how it is recognised, how memory is given back, and a limit for where there is no device."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from core.errors import ConfigError
from core.selection import Run

_TOLD = re.compile(
    "can't allocate memory|not enough memory|bad_alloc|_STATUS_ALLOC_FAILED|MPS backend out of memory"
)
"""What libraries say that raise a RuntimeError."""

GATHERING = dict.fromkeys(
    ("FSDP", "HybridParallel", "DeepSpeedZero", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"),
    "ranks gather parameters in forward: one that runs out of memory would leave the others waiting for ever",
)
"""For `@technique(conflicts=...)`: strategies under which a rank cannot run out of memory by itself."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory, of the device or the host, could not be had."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _TOLD.search(str(error)) is not None


def give_back() -> None:
    """Gives memory that nobody uses back to the device, or to the system."""
    gc.collect()  # cycles of graphs and tracebacks
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def held_bytes() -> int:
    """Returns the bytes of private memory that this process has mapped, used or not (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024


def ceiling(limit: int) -> int:
    """Returns, for :func:`limited`, so many bytes beyond what is held once what nobody uses is given back."""
    give_back()
    return held_bytes() + limit


@contextmanager
def limited(most: int | None) -> Iterator[None]:
    """Lets this process have so much private memory at most: beyond it allocations fail, as a device's do (Linux).

    Args:
        most: As :func:`held_bytes` counts, in bytes; None: as it is. A lower limit that there is stays.
    """
    if most is None:
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lower = most if before == resource.RLIM_INFINITY else min(most, before)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def check_limit(name: str, limit: int | None) -> None:
    """Raises a ConfigError if a technique's `memory_limit` is out of range."""
    if limit is not None and limit < 1:
        raise ConfigError(f"{name} takes a memory_limit from 1 byte upwards, not {limit}.")


def misfits(run: Run, limit: int | None) -> Iterator[str]:
    """Yields, for a technique's `preflight`, that a run needs a `memory_limit` or cannot have one."""
    if run.accelerator == "cpu" and limit is None and not run.elsewhere:
        yield "memory_limit is needed on a CPU, in bytes: without one the system kills the run before it is told"
    if run.accelerator == "cpu" and limit is not None and sys.platform != "linux":
        yield "memory_limit works on Linux only"
    if run.accelerator != "cpu" and limit is not None:
        yield f"memory_limit is for runs on a CPU; on {run.accelerator.upper()} the device's memory counts: leave it out"
