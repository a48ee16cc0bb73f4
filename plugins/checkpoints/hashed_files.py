"""Files that torch writes, with checksums of what was written: what a disk makes of it is found when it is read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from plugins.checkpoints.checked_files import sums_of


class HashedFiles(FileSystem):
    """In place of the file system of `FileSystemWriter`.

    Attributes:
        sums: Name of each file that is complete -> its size and SHA-256, as in a manifest.
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file that is written from its beginning to its end."""
        with super().create_stream(path, mode) as stream:
            hashed = _Stream(stream)
            yield hashed
        self.sums[Path(path).name] = hashed.sums()


class _Stream(io.IOBase):
    def __init__(self, file: Any) -> None:
        self._file, self._hash, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        written: int = self._file.write(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        number: int = self._file.fileno()
        return number

    def sums(self) -> dict[str, Any]:
        return sums_of(self._size, self._hash)
