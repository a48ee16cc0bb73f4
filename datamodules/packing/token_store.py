"""Stored tokens as one stream, read from litdata's chunks without litdata's order.

litdata cuts each chunk into blocks of its own and counts positions per worker, which loses chunk tails,
and repeats and skips data when ranks or workers change.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.data.remote_folder import RemoteFolder, remote_of
from core.errors import ConfigError
from datamodules.packing.remote_chunks import RemoteChunks, checked_header

_DTYPES = {"no_header_numpy:5": "uint16", "no_header_numpy:6": "uint32"}  # litdata's names


class TokenStore:
    """The tokens of a folder of litdata chunks as one stream, mapped into memory.

    A chunk is a header of uint32 (number of items; byte offset of each item and of the end), then the
    items' tokens. An item is a document.

    Args:
        folder: The chunks and their index.json; of a remote folder's copy, chunks come when they are read.
        remote: That remote folder; None: the one that this process has opened, if there is one.

    Attributes:
        remote: Its chunks; None where they are all here.

    Raises:
        ConfigError: If the index or a chunk is missing, cut off, or not what the index says.
    """

    remote: RemoteChunks | None = None

    def __init__(self, folder: Path, remote: RemoteFolder | None = None) -> None:
        self.folder, self._of = folder, remote or remote_of(folder.parent)
        self._chunks: Sequence[np.ndarray] = []
        self._offsets: Sequence[np.ndarray] = []
        path = folder / "index.json"
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            dtype = np.dtype(_DTYPES[index["config"]["data_format"][0]])
            chunks = index["chunks"]
            if not chunks:
                raise ValueError("it lists no chunks")
            sizes = np.array([(chunk["chunk_bytes"], chunk["chunk_size"]) for chunk in chunks], np.int64)
            tokens = (sizes[:, 0] - 4 * (sizes[:, 1] + 2)) // dtype.itemsize
            if self._of is not None:
                self.remote = RemoteChunks(self._of, folder.name, chunks, dtype)
                self._chunks, self._offsets = self.remote.tokens, self.remote.offsets
            else:
                mapped = []
                for chunk in chunks:
                    path = folder / chunk["filename"]
                    mapped.append(_map(path, chunk["chunk_bytes"], chunk["chunk_size"], dtype))
                self._offsets, self._chunks = zip(*mapped, strict=True)
            self._ends = np.cumsum(tokens)
            self._starts = self._ends - tokens
            self._end_list, self._start_list = self._ends.tolist(), self._starts.tolist()
            self._counts = np.cumsum(sizes[:, 1])
            self._itemsize, self._none = dtype.itemsize, np.empty(0, dtype)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{path} is missing or damaged: {type(error).__name__}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder, self._of)  # a spawned worker maps the chunks anew

    def __len__(self) -> int:
        return int(self._ends[-1])

    def document_starts(self) -> np.ndarray:
        """Returns the position of each document's first token, (number of documents,) int64."""
        chunks = zip(self._starts, self._offsets, strict=True)
        return np.concatenate([at + (o[:-1] - o[0]).astype(np.int64) // self._itemsize for at, o in chunks])

    @property
    def number_of_documents(self) -> int:
        """How many documents there are."""
        return int(self._counts[-1])

    def documents(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """Returns (first token, tokens) of each document, numbered in the stream's order."""
        found = []
        chunks = np.searchsorted(self._counts, indices, side="right")
        if self.remote is not None:
            self.remote.fetch_headers(np.unique(chunks).tolist())
        for index, chunk in zip(indices, chunks, strict=True):
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
        pieces = [
            self._chunks[chunk][max(0, start - self._start_list[chunk]) : stop - self._start_list[chunk]]
            for chunk in self.chunks_between(start, stop)
        ]
        return np.concatenate([self._none, *pieces])

    def chunks_between(self, start: int, stop: int) -> range:
        """Returns the numbers of the chunks that hold the tokens at positions [start, stop)."""
        last = min(bisect_right(self._end_list, stop - 1), len(self._end_list) - 1)
        return range(bisect_right(self._end_list, start), last + 1)

    @property
    def cache_bytes(self) -> int:
        """Size of the cache that the chunks of a remote folder go through; 0 where all are here."""
        return self._of.limit if self._of is not None else 0

    def remote_chunks(self, segments: Iterable[tuple[int, int]]) -> Iterator[tuple[RemoteChunks, int]]:
        """Yields the chunks of a remote folder that hold segments, (first token, tokens), with their labels."""
        if self.remote is not None:
            for first, size in segments:
                for chunk in self.chunks_between(first, first + size + 1):
                    yield self.remote, chunk

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
    header = checked_header(raw[: 4 * (items + 2)], size, items)
    return header[1:], raw[header.nbytes :].view(dtype)
