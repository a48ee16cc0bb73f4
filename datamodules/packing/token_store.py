"""Stored tokens as one stream, read from litdata's chunks without litdata's order.

litdata cuts each chunk into blocks of its own and counts positions per worker, which loses chunk tails,
and repeats and skips data when ranks or workers change.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError

_DTYPES = {"no_header_numpy:5": "uint16", "no_header_numpy:6": "uint32"}  # litdata's names


class TokenStore:
    """The tokens of a folder of litdata chunks as one stream, mapped into memory.

    A chunk is a header of uint32 (number of items; byte offset of each item and of the end), then the
    items' tokens. An item is a document.

    Raises:
        ConfigError: If the index or a chunk is missing, cut off, or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chunks: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        path = folder / "index.json"
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            dtype = np.dtype(_DTYPES[index["config"]["data_format"][0]])
            for chunk in index["chunks"]:
                path = folder / chunk["filename"]
                offsets, tokens = _map(path, chunk["chunk_bytes"], chunk["chunk_size"], dtype)
                self._offsets.append(offsets)
                self._chunks.append(tokens)
            self._ends = np.cumsum([len(chunk) for chunk in self._chunks])
            self._starts = self._ends - [len(chunk) for chunk in self._chunks]
            self._end_list, self._start_list = self._ends.tolist(), self._starts.tolist()
            self._counts = np.cumsum([len(offsets) - 1 for offsets in self._offsets])
            self._itemsize = dtype.itemsize
            if not self._chunks:
                raise ValueError("it lists no chunks")
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{path} is missing or damaged: {type(error).__name__}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)  # a spawned worker maps the chunks anew

    def __len__(self) -> int:
        return int(self._ends[-1])

    def document_starts(self) -> np.ndarray:
        """Returns the position of each document's first token, (number of documents,) int64."""
        chunks = zip(self._starts, self._offsets, self._chunks, strict=True)
        return np.concatenate([at + (o[:-1] - o[0]).astype(np.int64) // c.itemsize for at, o, c in chunks])

    @property
    def number_of_documents(self) -> int:
        """How many documents there are."""
        return int(self._counts[-1])

    def documents(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """Returns (first token, tokens) of each document, numbered in the stream's order."""
        found = []
        for index, chunk in zip(indices, np.searchsorted(self._counts, indices, side="right"), strict=True):
            offsets, within = (
                self._offsets[chunk],
                index - (self._counts[chunk] - len(self._offsets[chunk]) + 1),
            )
            begin, end = ((int(offsets[i]) - int(offsets[0])) // self._itemsize for i in (within, within + 1))
            found.append((int(self._starts[chunk]) + begin, end - begin))
        return found

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions in [start, stop) at which documents begin, int64; `len` counts as one."""
        chunk = bisect_right(self._end_list, start)
        pieces = []
        while chunk < len(self._chunks) and (at := self._start_list[chunk]) < stop:
            offsets = self._offsets[chunk]
            base = int(offsets[0]) - at * self._itemsize  # in bytes, as the header has them
            low = bisect_left(offsets, base + start * self._itemsize, 0, len(offsets) - 1)
            high = bisect_left(offsets, base + stop * self._itemsize, low, len(offsets) - 1)
            pieces.append((offsets[low:high].astype(np.int64) - base) // self._itemsize)
            chunk += 1
        if start <= len(self) < stop:
            pieces.append(np.array([len(self)]))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def copy(self, first: int, inputs: np.ndarray, labels: np.ndarray) -> bool:
        """Copies len(inputs) tokens from `first` on, and the one after each; -1 past the end.

        Returns:
            Whether all are there.
        """
        chunk, size = bisect_right(self._end_list, first), len(inputs)
        if chunk < len(self._chunks):
            begin = first - self._start_list[chunk]
            tokens = self._chunks[chunk][begin : begin + size + 1]
            if len(tokens) == size + 1:
                inputs[:], labels[:] = tokens[:-1], tokens[1:]
                return True
        tokens = self.read(first, first + size + 1).astype(np.int64)
        tokens = np.pad(tokens, (0, size + 1 - len(tokens)), constant_values=-1)
        inputs[:], labels[:] = tokens[:-1], tokens[1:]
        return bool(tokens[-1] >= 0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens at positions [start, stop), of the stored type; fewer where the stream ends."""
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        chosen = slice(first, last + 1)
        pieces = zip(self._chunks[chosen], self._starts[chosen], strict=True)
        empty = self._chunks[0][:0]
        return np.concatenate([empty, *(chunk[max(0, start - at) : stop - at] for chunk, at in pieces)])

    def counts(self, vocab_size: int) -> np.ndarray:
        """Returns how often each token id occurs, (vocab_size,) int64."""
        total = np.zeros(vocab_size, np.int64)
        for begin in range(0, len(self), 1 << 20):
            total += np.bincount(self.read(begin, begin + (1 << 20)), minlength=vocab_size)
        return total


def _map(path: Path, size: int, items: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns a chunk's byte offsets and tokens, both mapped; ValueError if it is not as announced."""
    raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    if len(raw) != size:
        raise ValueError(f"it has {len(raw):,} bytes, index.json says {size:,}")
    header = raw[: 4 * (items + 2)].view(np.uint32)
    if (header[0], header[1], header[-1]) != (items, header.nbytes, size):
        raise ValueError(f"its header does not describe {items} items in {size:,} bytes")
    return header[1:], raw[header.nbytes :].view(dtype)
