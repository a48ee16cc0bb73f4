"""Lines in groups that do not fit into memory: spilled, compressed, to a temporary file."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from typing import Any

import pyarrow

from core.errors import ConfigError

_HELD, _CODEC = 1 << 26, "lz4"


class SpilledLines:
    """Lines, each of which belongs to a group. A group is read as a whole; its lines stay in the order of `add`.

    Up to 64 MiB of lines stay in memory. The file is in the folder that TMPDIR names; it has no name, so that it goes
    with the process, however that ends.

    Args:
        groups: Number of groups.

    Raises:
        ConfigError: When adding, if the file cannot be written.
    """

    def __init__(self, groups: int) -> None:
        self._held: list[list[bytes]] = [[] for _ in range(groups)]
        self._blocks = [
            array("Q") for _ in range(groups)
        ]  # place, bytes, bytes without compression; for each
        self._bytes = 0
        self._file: Any = None

    def __enter__(self) -> SpilledLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, group: int, line: bytes) -> None:
        """Adds a line, without its end."""
        self._held[group].append(line)
        self._bytes += len(line)
        if self._bytes >= _HELD:
            try:
                self._spill()
            except OSError as error:
                raise ConfigError(
                    f"{tempfile.gettempdir()}: {error.strerror}. A dump is sorted there, which takes about a third of its "
                    "size.\nName another folder in the environment variable TMPDIR."
                ) from error

    def groups(self) -> Iterator[list[bytes]]:
        """Yields the lines of each group that has some, in the order of the groups; they can be read once."""
        for number, blocks in enumerate(self._blocks):
            lines = []
            for place, size, whole in zip(*(blocks[part::3] for part in range(3)), strict=True):
                self._file.seek(place)
                block = pyarrow.decompress(self._file.read(size), whole, _CODEC, asbytes=True)
                lines += block.split(b"\n")
            lines += self._held[number]
            self._held[number] = []
            if lines:
                yield lines

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        for held, blocks in zip(self._held, self._blocks, strict=True):
            if held:
                whole = b"\n".join(held)
                block = pyarrow.compress(whole, _CODEC, asbytes=True)
                blocks.extend((self._file.tell(), self._file.write(block), len(whole)))
                held.clear()
        self._bytes = 0
