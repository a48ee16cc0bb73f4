"""Out-of-memory errors: recognising them, freeing memory, and a memory limit for CPU runs."""

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
from toolkit.selection import Run

_MESSAGES = re.compile(
    "can't allocate memory|not enough memory|bad_alloc|_STATUS_ALLOC_FAILED|MPS backend out of memory"
    "|(CUDA|HIP) error: out of memory|Cuda failure \\d+ 'out of memory'|CUDA_ERROR_OUT_OF_MEMORY"
    "|^Resource temporarily unavailable$|can't start new thread"
)
"""Messages of libraries that raise a RuntimeError when memory runs out: of the host's allocator, cuBLAS and cuDNN, and, where
memory is taken past torch's caching allocator, of the CUDA runtime, NCCL and the driver; of C++ and Python where there is no room
for the stack of a thread.
"""

TALKING = dict.fromkeys(
    ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"),
    "ranks talk in each step past torch's dispatcher, or by means that no rank has without the others: take FSDP",
)
"""For `@technique(conflicts=...)`: strategies under which no rank can try or repeat a step by itself (`toolkit.lone_ranks`)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that memory of the device or the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def give_back() -> None:
    """Returns unused memory to the device and to the system."""
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
    """Returns, for :func:`limited`, what the process holds after unused memory was returned, plus this many bytes."""
    give_back()
    return held_bytes() + limit


@contextmanager
def limited(most: int | None) -> Iterator[None]:
    """Limits the private memory of this process: beyond the limit allocations fail, as on a device (Linux).

    Args:
        most: Bytes, as :func:`held_bytes` counts them; None: no change. A lower limit that exists is kept.
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


def drops_steps() -> bool:
    """Returns whether torch's FSDP2 can drop a step that broke off."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "reset_iter_state")


def _of_deepspeed(run: Run) -> Iterator[str]:
    """Yields under which options of DeepSpeedZero no rank can try or repeat a step by itself."""
    strategy = next((item for item in run.selected if item.name == "DeepSpeedZero"), None)
    if strategy is None:
        return
    if strategy.arguments.get("stage") == 3:
        yield (
            "in stage 3 all ranks record the same order in which parameters are gathered, and a step that breaks off on one "
            "rank has none: set --trainer.strategy.stage=2, or take FSDP"
        )
    elif strategy.arguments.get("offload_optimizer", "none") != "none":
        yield (
            "copies of gradients to the host may still be under way when a step breaks off: set "
            "--trainer.strategy.offload_optimizer=none, or take FSDP"
        )


def compatibility_errors(run: Run, limit: int | None) -> Iterator[str]:
    """Yields, for a technique's `preflight`, that a run needs a `memory_limit` or cannot have one, or that torch is too old."""
    sharding = next((item.name for item in run.selected if item.name in ("FSDP", "HybridParallel")), None)
    if sharding and not drops_steps():
        yield (
            f"FSDP2 of torch {torch.__version__} cannot go on behind a step that broke off (FSDPModule.reset_iter_state, which 2.14 has): "
            f"take a newer torch, or leave {sharding} out"
        )
    yield from _of_deepspeed(run)
    if run.accelerator == "cpu" and limit is None and not run.offline:
        yield "memory_limit is needed on a CPU, in bytes: without one the system kills the run without an error"
    if run.accelerator == "cpu" and limit is not None and sys.platform != "linux":
        yield "memory_limit works on Linux only"
    if run.accelerator != "cpu" and limit is not None:
        yield f"memory_limit is for runs on a CPU; on {run.accelerator.upper()} the device's memory counts: leave it out"
