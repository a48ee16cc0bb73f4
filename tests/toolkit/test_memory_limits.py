"""Real allocations that fail are recognised, under a limit that is taken away again."""

import ctypes
import mmap
import resource
import sys

import pytest
import torch

from conformance.runs import in_subprocess
from core.technique import Declaration
from tests.support.limits import M_MMAP_THRESHOLD, M_TOP_PAD
from toolkit import memory_limits
from toolkit.selection import Run, Selected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")


TAKES = {
    "tensor": lambda: torch.zeros(1 << 28),
    "bytes": lambda: bytearray(1 << 30),
    "more than any machine has, whatever the limit": lambda: torch.zeros(1 << 40).add_(1),
}


def beyond_the_limit(what):
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    libc.mallopt(M_TOP_PAD, 1 << 17)
    memory_limits.give_back()  # the heap's end is taken first, however large it is
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises((RuntimeError, MemoryError)) as raised:  # noqa: SIM117
        with memory_limits.limited(memory_limits.held_bytes() + 10_000_000):
            TAKES[what]()
    assert memory_limits.is_out_of_memory(raised.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("what", TAKES)
def test_an_allocation_beyond_the_limit_fails_and_is_recognised(what):
    """In a process whose heap has no gibibyte in its middle that runs of other tests have freed, which no limit counts."""
    in_subprocess(beyond_the_limit, what)


def test_within_the_limit_all_is_well():
    with memory_limits.limited(memory_limits.held_bytes() + 100_000_000):
        assert torch.ones(1_000_000).sum() == 1_000_000
    with memory_limits.limited(None):
        assert len(bytearray(1 << 28)) == 1 << 28


def test_a_lower_limit_stays():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    low = memory_limits.held_bytes() + 20_000_000
    resource.setrlimit(resource.RLIMIT_DATA, (low, before[1]))
    try:
        with memory_limits.limited(low + 1_000_000_000):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == low
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_held_bytes_are_counted():
    before = memory_limits.held_bytes()
    # A mapping, not a tensor: malloc may serve that from what other tests have freed in the heap.
    with mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert memory_limits.held_bytes() - before == pytest.approx(50_000_000, abs=1_000_000)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            True,
        ),
        (RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("Resource temporarily unavailable"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] read: Resource temporarily unavailable"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_it):
    assert memory_limits.is_out_of_memory(error) is is_it


def test_sharding_is_refused_with_a_torch_that_cannot_drop_a_step(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    sharding = Selected("", "FSDP", "", "strategies", "", "", Declaration(""))
    run = Run(selected=(sharding,), accelerator="cpu")
    if memory_limits.drops_steps():
        assert list(memory_limits.compatibility_errors(run, 1)) == []
        monkeypatch.delattr(FSDPModule, "reset_iter_state")
    [said] = memory_limits.compatibility_errors(run, 1)
    assert "take a newer torch, or leave FSDP out" in said
