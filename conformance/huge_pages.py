"""Imported last by the fork server: what it has imported lies in huge pages then, of which a fork copies 512 times fewer entries.

A fork of 700 MB in pages of 4 KiB takes 50 ms of CPU time, with this 20; a tiny run takes 400. Where the system cannot, nothing is
done: Linux can from 6.1 on.
"""

import ctypes
import gc
import sys
from pathlib import Path

HUGE = 2 << 20
COLLAPSE = 25
"""MADV_COLLAPSE, which Python's mmap knows for its own mappings alone."""


def join_pages() -> int:
    """Returns how many bytes of this process were put into huge pages."""
    libc, joined = ctypes.CDLL(None), 0
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split()
        if not rights.startswith("rw") or name not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if begin < end and libc.madvise(begin, end - begin, COLLAPSE) == 0:
            joined += end - begin
    return joined


gc.collect()
if sys.platform == "linux":
    join_pages()
