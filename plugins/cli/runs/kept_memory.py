"""How a run on the CPU gets its memory: what a step frees is kept for the next one, in large pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2
"""Parameters of glibc's `mallopt`."""

LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14
AT_ONCE, LATER = 2**31 - LARGE_PAGE, 2**26
"""Bytes of addresses that the heap grows by, now and then each time."""

SETTINGS = ("GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which a user has decided how memory is allocated, beside those that begin with MALLOC_."""


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Lets glibc keep freed memory, and the kernel back it with pages of 2 MiB where these are allowed.

    By default glibc returns the tensors of a step to the kernel, which clears and maps the pages anew in the next step, 4 KiB at
    a time; large pages also cost fewer misses in the tables of addresses. A process keeps as much as its
    largest step took. It does nothing where the user has decided or has limited the memory of the process, of which addresses
    that are kept would take a part, and without glibc. Beyond the first 2 GiB (a quarter of the machine's memory if that is
    less) there are pages of the usual size.

    Returns:
        Whether it was done.
    """
    decided = any(name in SETTINGS or name.startswith("MALLOC_") for name in environ)
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or decided or _limited():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    # releases before 2.35 take 32 MiB at most
    if not (libc.mallopt(MMAP_THRESHOLD, 2**30) or libc.mallopt(MMAP_THRESHOLD, 2**25)):
        return False
    libc.mallopt(TRIM_THRESHOLD, -1)  # never
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _grow_heap(libc, min(AT_ONCE, memory // 4))
    libc.mallopt(TOP_PAD, LATER)
    return True


def _limited() -> bool:
    import resource

    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def _grow_heap(libc: ctypes.CDLL, size: int) -> None:
    """Grows the heap by addresses without memory behind them yet, and asks for large pages there."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    before = _heap_end()
    libc.mallopt(TOP_PAD, size)
    libc.free(libc.malloc(2**25 - mmap.PAGESIZE))
    begin, end = -(-before // LARGE_PAGE) * LARGE_PAGE, _heap_end() // LARGE_PAGE * LARGE_PAGE
    if end > begin:
        libc.madvise(begin, end - begin, MADV_HUGEPAGE)  # a kernel without them refuses: nothing is lost


def _heap_end() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [int(line.split()[0].partition("-")[2], 16) for line in lines if line.endswith("[heap]")]
    return max(ends, default=0)
