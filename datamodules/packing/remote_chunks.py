"""The chunks of a remote folder, mapped into memory while they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from core.data.remote_folder import RemoteFolder
from core.errors import ConfigError

_MAPPED = 256
"""So many chunks and headers, at most, a process has mapped or in memory at a time."""

_SHARE = 16
"""Chunks that one process has mapped, and the cache cannot delete, take up to one part in so many of it."""

_CONNECTIONS = 16


@dataclass
class _Numbered(Sequence):
    """What a function returns for each number, as a sequence."""

    length: int
    get: Callable[[int], np.ndarray]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if number >= self.length:
            raise IndexError(number)
        return self.get(number)


class RemoteChunks:
    """The chunks of a split: fetched when they are read, and mapped as long as they are among the last few read.

    Headers, which say where documents begin, are kept in files of their own once they were asked for: packing
    whole documents asks for all of them before it reads many tokens.

    Args:
        remote: The folder.
        split: "train" or "validation".
        chunks: What index.json says of each chunk.
        dtype: Of a token.

    Attributes:
        tokens: The tokens of each chunk.
        offsets: The byte offsets of each chunk's documents, uint32.
        sizes: Bytes of each chunk.
    """

    def __init__(
        self, remote: RemoteFolder, split: str, chunks: Sequence[dict[str, Any]], dtype: np.dtype
    ) -> None:
        self.remote, self.dtype = remote, dtype
        self.names = [f"{split}/{chunk['filename']}" for chunk in chunks]
        self.sizes = [int(chunk["chunk_bytes"]) for chunk in chunks]
        self._items = [int(chunk["chunk_size"]) for chunk in chunks]
        for name, size in zip(self.names, self.sizes, strict=True):
            known = remote.files.get(name, {}).get("bytes") == size
            if not known or name.count("/") > 1:  # which could lead out of the cache
                raise ConfigError(
                    f"{remote.url}: manifest.json and {split}/index.json do not agree on {name}. Upload them again."
                )
        most = min(_MAPPED, max(1, remote.limit // (_SHARE * max(self.sizes))))
        self.tokens = _Numbered(len(chunks), lru_cache(most)(self._map))
        self.offsets = _Numbered(len(chunks), lru_cache(_MAPPED)(self._map_header))

    def _map(self, number: int) -> np.ndarray:
        return self.remote.map(self.names[number])[4 * (self._items[number] + 2) :].view(self.dtype)

    def _map_header(self, number: int) -> np.ndarray:
        path, items = self._header(number), self._items[number]
        try:
            return checked_header(np.fromfile(path, np.uint8), self.sizes[number], items)[1:]
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"{self.remote.url}/{self.names[number]} is damaged: {error}. Upload it again."
            ) from error

    def _header(self, number: int) -> Path:
        return self.remote.fetch_head(self.names[number], 4 * (self._items[number] + 2))

    def fetch_headers(self, numbers: Sequence[int]) -> None:
        """Fetches the headers of several chunks at the same time, those that are not here."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(self._header, numbers))


def checked_header(raw: np.ndarray, size: int, items: int) -> np.ndarray:
    """Returns a chunk's header as uint32; ValueError if it is not that of so many items in so many bytes."""
    header = raw.view(np.uint32)
    if len(header) != items + 2 or (header[0], header[1], header[-1]) != (items, header.nbytes, size):
        raise ValueError(f"its header does not describe {items} items in {size:,} bytes")
    return header
