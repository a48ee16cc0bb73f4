"""The chunks of a remote folder, memory-mapped while they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError
from datamodules.packing.mapped_file import MappedFile
from datamodules.packing.token_index import TokenIndex, checked_header, header_bytes
from datamodules.remote.remote_folder import RemoteFolder

_MAPPED = 256
"""Most chunks, and most headers, that a process keeps mapped or in memory."""

_SHARE = 16
"""Mapped chunks cannot be deleted: those of one process take at most this fraction (1/16) of the cache."""

_CONNECTIONS = 16


@dataclass
class Numbered(Sequence):
    """A sequence whose items a function computes."""

    length: int
    get: Callable[[int], np.ndarray]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if number >= self.length:
            raise IndexError(number)
        return self.get(number)


class RemoteChunks:
    """The chunks of a split: fetched when they are read, and mapped while they are among the most recently read.

    Headers hold where documents begin. Each is stored in a file of its own after its first use, because packing
    complete documents reads all headers before it reads many tokens.

    Args:
        remote: The folder.
        split: "train", "validation" or "test".
        index: The content of index.json.

    Attributes:
        tokens: The tokens of each chunk.
        offsets: The byte offsets of each chunk's documents, uint32.
        sizes: Bytes of each chunk.
    """

    def __init__(self, remote: RemoteFolder, split: str, index: TokenIndex) -> None:
        self.remote, self.dtype = remote, index.dtype
        self.names = [f"{split}/{name}" for name in index.names]
        self.sizes, self._items = index.sizes.tolist(), index.items.tolist()
        for name, size in zip(self.names, self.sizes, strict=True):
            if remote.files.get(name, {}).get("bytes") != size:
                raise ConfigError(
                    f"{remote.url}: manifest.json and {split}/index.json do not agree on {name}. Upload them again."
                )
        most = min(_MAPPED, max(1, remote.limit // (_SHARE * max(self.sizes))))
        self._mapped = lru_cache(most)(self._map)
        self.tokens = Numbered(len(self.names), lambda number: self._mapped(number)[1])
        self.offsets = Numbered(len(self.names), lru_cache(_MAPPED)(self._map_header))

    def _map(self, number: int) -> tuple[MappedFile, np.ndarray]:
        """Returns a chunk, and its tokens."""
        file = self.remote.map(self.names[number])
        return file, file.raw[header_bytes(self._items[number]) :].view(self.dtype)

    def require(self, number: int, begin: int, end: int) -> None:
        """Has some bytes of a chunk read, before they are touched.

        Raises:
            ConfigError: If they cannot be.
        """
        try:
            self._mapped(number)[0].require(begin, end)
        except OSError as error:
            raise self.remote.damaged(self.names[number], error) from error

    def _map_header(self, number: int) -> np.ndarray:
        path, items = self._header(number), self._items[number]
        try:
            raw = np.fromfile(path, np.uint8)
            return checked_header(raw, self.sizes[number], items, self.dtype.itemsize)
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.remote.url}/{self.names[number]} is damaged: {error}. Upload it again."
            ) from error

    def _header(self, number: int) -> Path:
        return self.remote.fetch_head(self.names[number], header_bytes(self._items[number]))

    def fetch_headers(self, numbers: Sequence[int]) -> None:
        """Fetches the missing headers of several chunks in parallel."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(self._header, numbers))
