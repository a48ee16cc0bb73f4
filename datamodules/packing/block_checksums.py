"""CRC-32 of each block of a folder's chunks: a reader finds a flipped bit when it first reads the block.

checksums.crc32 lies beside index.json. It holds 8 bytes of name, the bytes of a block as uint64, then a uint32 for each
block of each chunk, chunks in the order of index.json; the last block of a chunk is shorter. All numbers are little-endian.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from core.errors import ConfigError
from datamodules.packing.mapped_file import MappedFile
from datamodules.packing.token_index import within
from toolkit.bounded import open_inside, read_error

CHECKSUMS = "checksums.crc32"

_SHIFT = 14
BLOCK_BYTES = 1 << _SHIFT
"""Short beside a row of a long context: a row is read from one or two blocks, which are all that it costs."""

_HEAD = b"tokcrc32" + BLOCK_BYTES.to_bytes(8, "little")
_STEP = 1 << 20


def sums_of(path: Path) -> np.ndarray:
    """Returns the CRC-32 of each block of a file, uint32."""
    sums = []
    with path.open("rb") as stream:
        while piece := memoryview(stream.read(_STEP)):
            sums += [zlib.crc32(piece[at : at + BLOCK_BYTES]) for at in range(0, len(piece), BLOCK_BYTES)]
    return np.array(sums, "<u4")


def write_sums(path: Path, sums: Iterable[np.ndarray]) -> None:
    """Writes a file of the sums of a folder's chunks, in the order of its index.json."""
    with path.open("wb") as stream:
        stream.write(_HEAD)
        for of_chunk in sums:
            stream.write(of_chunk.tobytes())


def read_sums(folder: Path, sizes: Sequence[int]) -> tuple[MappedFile, list[np.ndarray]] | None:
    """Returns the mapped file and, in it, the sums of each chunk; None where an earlier version, or litdata, wrote the folder.

    Args:
        folder: The chunks.
        sizes: Bytes of each chunk.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it does not have a sum for each block.
    """
    ends = np.cumsum([-(-size >> _SHIFT) for size in sizes])
    expected = len(_HEAD) + 4 * int(ends[-1])
    try:
        with open_inside(*within(folder, CHECKSUMS)) as stream:
            if (found := stream.seek(0, 2)) != expected:
                raise ValueError(f"it has {found:,} bytes, the chunks' blocks need {expected:,}")
            file = MappedFile(stream)
    except FileNotFoundError:
        return None
    file.require(0, len(_HEAD))
    if file.raw[: len(_HEAD)].tobytes() != _HEAD:
        raise ValueError("it does not begin as a file of checksums does")
    return file, np.split(file.raw[len(_HEAD) :].view("<u4"), ends[:-1])


def damaged_sums(folder: Path, error: OSError | ValueError) -> ConfigError:
    """Returns what is said where the sums of a folder's chunks cannot be read."""
    return ConfigError(f"{folder / CHECKSUMS} is missing or damaged: {read_error(error)}")


class BlockChecks:
    """Holds each block of local chunks against its CRC-32 when this process first reads it, and not again.

    What has been read is noted in a bitmap: 8 bytes for each MiB of tokens.

    Args:
        folder: The chunks.
        names: File name of each.
        file: Of the sums, as :func:`read_sums` returned it.
        sums: Of each chunk.

    Attributes:
        left: Number of blocks that have not been read yet.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], file: MappedFile, sums: Sequence[np.ndarray]
    ) -> None:
        self.folder, self.names, self.sums, self._file = folder, names, sums, file
        counts = [len(of_chunk) for of_chunk in sums]
        self.left = sum(counts)
        self._first = [0, *np.cumsum(counts).tolist()]
        self._seen = bytearray(-(-self.left >> 3))

    def check(self, number: int, file: MappedFile, begin: int, end: int) -> None:
        """Checks the blocks that hold some bytes of a chunk.

        Args:
            number: Of the chunk.
            file: All of its bytes.
            begin: First byte that is read.
            end: First byte behind those that are read.

        Raises:
            OSError: If a block cannot be read.
            ConfigError: If one has changed since it was written.
        """
        seen, first = self._seen, self._first[number]
        for block in range(begin >> _SHIFT, (end - 1 >> _SHIFT) + 1):
            place, bit = first + block >> 3, 1 << (first + block & 7)
            if not seen[place] & bit:
                at = block << _SHIFT
                stop = min(at + BLOCK_BYTES, len(file.raw))
                file.require(at, stop)
                if zlib.crc32(file.raw[at:stop].data) != self._sum(number, block):
                    raise self._error(number, at, stop)
                seen[place] |= bit
                self.left -= 1

    def _sum(self, number: int, block: int) -> int:
        at = len(_HEAD) + 4 * (self._first[number] + block)
        try:
            self._file.require(at, at + 4)
        except OSError as error:
            raise damaged_sums(self.folder, error) from error
        return int(self.sums[number][block])

    def _error(self, number: int, begin: int, end: int) -> ConfigError:
        of = self.folder.parent
        return ConfigError(
            f"{self.folder / self.names[number]} is damaged: bytes {begin:,} to {end - 1:,} are not as they were written; "
            f"{CHECKSUMS}\nbeside it has another CRC-32. `python -m core verify-data {of}` lists what else is "
            f"damaged.\nTake another copy of {of}, or prepare the text again; a folder in data.cache_dir is prepared again "
            "after it is deleted."
        )
