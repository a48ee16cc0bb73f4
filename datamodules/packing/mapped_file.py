"""A file that is mapped into memory, whose bytes can be asked for before they are touched.

A process that touches bytes which the file has lost, or which its disk does not give, is ended by SIGBUS, without a word.
"""

from __future__ import annotations

import errno
import mmap
from typing import IO

import numpy as np

_PAGE = -mmap.PAGESIZE
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 and later, which has no name in `mmap`; earlier kernels refuse it."""


class MappedFile:
    """The bytes of a file.

    Args:
        stream: The file, not empty.

    Attributes:
        raw: Its bytes.
    """

    __slots__ = ("_mapped", "raw")

    def __init__(self, stream: IO[bytes]) -> None:
        self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.raw = np.frombuffer(self._mapped, np.uint8)

    def require(self, begin: int, end: int) -> None:
        """Has the system read some bytes now.

        Raises:
            OSError: If it cannot.
        """
        # the rest of the page in which a file ends reads as zeros
        if self._mapped.size() >= end and self._populated(begin & _PAGE, end):
            return
        what = f"bytes {begin:,} to {end - 1:,} cannot be read: it was cut while it was in use, or its disk fails"
        raise OSError(errno.EIO, what)

    def _populated(self, page: int, end: int) -> bool:
        try:
            self._mapped.madvise(_POPULATE_READ, page, end - page)
        except OSError as error:
            return error.errno != errno.EFAULT  # any other means that the system cannot do it
        return True
