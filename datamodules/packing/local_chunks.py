"""Chunks on this machine, memory-mapped when they are first read, as many at a time as a process may have."""

from __future__ import annotations

import itertools
import os
import resource
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np

from core.errors import ConfigError
from datamodules.packing.block_checksums import BlockChecks, damaged_sums, read_sums
from datamodules.packing.mapped_file import MappedFile
from datamodules.packing.token_index import (
    INDEX,
    checked_header,
    header_bytes,
    read_header,
    read_index,
    within,
)
from toolkit.bounded import open_inside, read_error

_MAPPINGS = 1 << 16
"""Mappings that Linux allows a process by default (vm.max_map_count)."""

_CHECKED_AT_ONCE = 1 << 24, 1 << 10
"""Documents and chunks of a folder up to which all headers are checked when it is opened; beyond it, when they are read."""


class _Chunk:
    """A mapped chunk.

    Attributes:
        file: The file.
        raw: Its bytes.
        tokens: Those behind the header.
        offsets: The byte offsets of its documents and of their end; None: not read yet.
    """

    __slots__ = ("file", "offsets", "raw", "tokens")

    def __init__(self, file: MappedFile, tokens: np.ndarray) -> None:
        self.file, self.raw, self.tokens = file, file.raw, tokens
        self.offsets: np.ndarray | None = None


_mapped: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()
"""What this process has mapped, of all folders; what was read last is last. Keys: folder, number of the chunk."""

_numbers = itertools.count()
_opened: weakref.WeakValueDictionary[tuple[Path, int, int, int], LocalChunks] = weakref.WeakValueDictionary()


class LocalChunks:
    """The chunks of a folder on this machine; see :func:`local_chunks`.

    Args:
        folder: The chunks and their index.json.

    Attributes:
        index: The content of index.json.
        checks: Holds blocks against checksums.crc32; None where there are no sums.
        is_small: Whether all headers are checked when the folder is opened, which reads a page of each chunk.

    Raises:
        OSError: If index.json cannot be read.
        ValueError: If index.json is damaged.
        ConfigError: If checksums.crc32 is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index, self.checks = folder, read_index(folder), None
        documents, chunks = _CHECKED_AT_ONCE
        self.is_small = len(self.index.names) <= chunks and int(self.index.items.sum()) <= documents
        self._begins = header_bytes(self.index.items).tolist()
        self._sound = bytearray(len(self.index.names))  # whose headers have been checked
        self._number = next(_numbers)
        weakref.finalize(self, _forget, self._number).atexit = False
        try:
            if sums := read_sums(folder, self.index.sizes.tolist()):
                self.checks = BlockChecks(folder, self.index.names, *sums)
        except (OSError, ValueError) as error:
            raise damaged_sums(folder, error) from error

    def require(self, number: int, begin: int, end: int, checks: BlockChecks | None) -> None:
        """Has some bytes of a chunk read, before they are touched, and checks the blocks that hold them.

        Args:
            number: Of the chunk.
            begin: First byte.
            end: First byte behind them.
            checks: None: the blocks are not checked.

        Raises:
            ConfigError: If they cannot be read, or are damaged.
        """
        file = self._chunk(number).file
        try:
            file.require(begin, end)
            if checks:
                checks.check(number, file, begin, end)
        except OSError as error:
            raise self._damaged(number, error) from error

    def tokens(self, number: int) -> np.ndarray:
        """Returns the tokens of a chunk."""
        return self._chunk(number).tokens

    def offsets(self, number: int) -> np.ndarray:
        """Returns the byte offsets of a chunk's documents and of their end, uint32; checks them when they are first read.

        Raises:
            ConfigError: If they are damaged.
        """
        chunk = self._chunk(number)
        if chunk.offsets is None:
            items, raw = int(self.index.items[number]), chunk.raw
            if self._sound[number]:
                chunk.offsets = read_header(raw, len(raw), items)
            else:
                self.require(number, 0, header_bytes(items), self.checks)
                try:
                    chunk.offsets = checked_header(raw, len(raw), items, self.index.dtype.itemsize)
                except ValueError as error:
                    raise self._damaged(number, error) from error
                self._sound[number] = 1
        return chunk.offsets

    def check_headers(self) -> None:
        """Reads all headers that have not been read.

        Raises:
            ConfigError: If a chunk is missing, or one or its header is damaged.
        """
        while (number := self._sound.find(0)) >= 0:
            self.offsets(number)

    def _chunk(self, number: int) -> _Chunk:
        key = self._number, number
        if (chunk := _mapped.get(key)) is None:
            _make_room()
            file = self._map(number)
            chunk = _mapped[key] = _Chunk(file, file.raw[self._begins[number] :].view(self.index.dtype))
        else:
            _mapped.move_to_end(key)
        return chunk

    def _map(self, number: int) -> MappedFile:
        size, name = int(self.index.sizes[number]), self.index.names[number]
        try:
            with open_inside(*within(self.folder, name)) as stream:
                if (found := stream.seek(0, 2)) != size:
                    raise ValueError(f"it has {found:,} bytes, {INDEX} says {size:,}")
                file = MappedFile(stream)
            file.require(0, self._begins[number])
            read_header(file.raw, size, int(self.index.items[number]))
        except (OSError, ValueError) as error:
            raise self._damaged(number, error) from error
        return file

    def _damaged(self, number: int, error: OSError | ValueError) -> ConfigError:
        return ConfigError(
            f"{self.folder / self.index.names[number]} is missing or damaged: {read_error(error)}"
        )


def local_chunks(folder: Path) -> LocalChunks:
    """Returns the chunks of a folder: the same for all who read it in this process, as long as its index.json stays.

    Raises:
        OSError: If index.json cannot be read; all as :class:`LocalChunks`.
    """
    there = os.stat(folder / INDEX)
    key = folder, there.st_ino, there.st_mtime_ns, there.st_size
    if (found := _opened.get(key)) is None:
        found = _opened[key] = LocalChunks(folder)
    return found


def _make_room() -> None:
    """Lets go of the chunk that was not read for the longest time, where there are as many as may be."""
    while len(_mapped) >= _most_mapped(len(_mapped) + 1):
        _mapped.popitem(last=False)


def _forget(folder: int) -> None:
    for key in list(
        _mapped
    ):  # at once: this may be called while another folder is forgotten, or a chunk makes room
        if key[0] == folder:
            _mapped.pop(key, None)


def _most_mapped(wanted: int) -> int:
    """Returns how many chunks this process keeps mapped.

    Each mapped chunk is an open file. This process's soft limit of open files is raised to the hard limit where it
    takes that, of which chunks use a quarter at most.
    """
    soft, hard = (
        _MAPPINGS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if wanted > soft // 4 and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        soft = hard
    return max(1, min(soft // 4, _MAPPINGS // 2))
