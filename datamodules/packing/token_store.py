"""Stored tokens as one stream, read from litdata's chunks without litdata's order.

litdata cuts each chunk into blocks of its own and counts positions per worker, which loses chunk tails,
and repeats and skips data when ranks or workers change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError
from datamodules.packing.block_checksums import BlockChecks
from datamodules.packing.local_chunks import LocalChunks, local_chunks
from datamodules.packing.remote_chunks import Numbered, RemoteChunks
from datamodules.packing.token_index import INDEX, header_bytes, read_index
from datamodules.remote.remote_folder import RemoteFolder, remote_of
from toolkit.bounded import read_error

_parts: dict[Path, tuple[Path, tuple[int, int] | None]] = {}


def part_of(folder: Path, first: int, stop: int) -> Path:
    """Returns a name by which a packing opens the tokens at positions [first, stop) of a folder, in this process.

    Nothing is written: a part is two numbers, which worker processes get with the store.
    """
    name = folder / f"tokens-{first}-{stop}"
    _parts[name] = folder, (first, stop)
    return name


class TokenStore:
    """The tokens of a folder of litdata chunks as one stream, mapped into memory chunk by chunk as they are read.

    Args:
        folder: The chunks and their index.json (see :mod:`datamodules.packing.token_index`). In the local copy of a
            remote folder, chunks are downloaded when they are read, and checked then. Local ones are held against
            checksums.crc32, where there is one, block by block as they are read (:class:`BlockChecks`).
        remote: The remote folder; None: the one that this process has opened for `folder`, if any.
        span: First token and end of the part of the stream that the store holds; None: all.

    Attributes:
        remote: Chunks of the remote folder; None for a local one.

    Raises:
        ConfigError: If the index or a chunk is missing, truncated, inconsistent with the index, or outside the folder.
    """

    remote: RemoteChunks | None = None
    _local: LocalChunks | None = None
    _low = 0  # the number in the folder of the first chunk
    _chunks: Sequence[np.ndarray]
    _offsets: Sequence[np.ndarray]
    _checks: BlockChecks | None = None

    def __init__(
        self, folder: Path, remote: RemoteFolder | None = None, span: tuple[int, int] | None = None
    ) -> None:
        folder, span = _parts.get(folder, (folder, span))
        self.folder, self.span, self._of = folder, span, remote or remote_of(folder.parent)
        try:
            if self._of is None:
                self._local = local_chunks(folder)
            index, begin = self._local.index if self._local else read_index(folder), 0
            if index.compressed and self._of is None:
                raise ValueError("its chunks are compressed; --data=LitdataDataModule reads them")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / INDEX} is missing or damaged: {read_error(error)}") from error
        if span is not None:
            index, self._low, begin = index.between(*span)
        if self._of is not None:
            self.remote = RemoteChunks(self._of, folder.name, index)
            self._chunks, self._offsets = self.remote.tokens, self.remote.offsets
        elif (local := self._local) is not None:
            low, count = self._low, len(index.names)
            self._chunks = Numbered(count, lambda number: local.tokens(low + number))
            self._offsets = Numbered(count, lambda number: local.offsets(low + number))
            self._checks = local.checks if span is None else None
        tokens, self._items = index.tokens, index.items
        self._begins = header_bytes(index.items).tolist()
        self._itemsize, self._none = index.dtype.itemsize, np.empty(0, index.dtype)
        self._signed = index.dtype.kind == "i"
        if span is not None:
            tokens, self._items = self._trim(tokens, self._items, span[0] - begin, span[1] - begin)
        self._ends = np.cumsum(tokens)
        self._starts = self._ends - tokens
        self._end_list, self._start_list = self._ends.tolist(), self._starts.tolist()
        self._counts = np.cumsum(self._items)
        if self._local and self._local.is_small:
            self._local.check_headers()

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder, self._of, self.span)  # a spawned worker maps the chunks itself

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _trim(
        self, tokens: np.ndarray, items: np.ndarray, first: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cuts the first and the last chunk, so that the store begins at a token and ends before another.

        Args:
            tokens: Tokens of each chunk.
            items: Documents of each chunk.
            first: The token that it begins with, in the first chunk.
            stop: The end.

        Returns:
            Tokens and documents of each chunk then; a document that is cut is one in both parts.
        """
        tokens, items, starts = tokens.copy(), items.copy(), np.cumsum(tokens) - tokens
        whole, whole_offsets, cuts = self._chunks, self._offsets, {}
        for number in {0, len(tokens) - 1}:
            at = int(starts[number])
            cuts[number] = max(first - at, 0), min(stop - at, int(tokens[number]))
        trimmed = {n: _between(whole_offsets[n], *cut, self._itemsize) for n, cut in cuts.items()}
        self._chunks = Numbered(len(tokens), lambda n: whole[n][slice(*cuts[n])] if n in cuts else whole[n])
        self._offsets = Numbered(len(tokens), lambda n: trimmed[n] if n in trimmed else whole_offsets[n])
        for number, (low, high) in cuts.items():
            tokens[number], items[number] = high - low, len(trimmed[number]) - 1
            self._begins[number] += low * self._itemsize
        return tokens, items

    def document_starts(self) -> np.ndarray:
        """Returns the position of each document's first token, (number of documents,) int64."""
        chunks = zip(self._starts, self._offsets, strict=True)
        return np.concatenate([at + (o[:-1] - o[0]).astype(np.int64) // self._itemsize for at, o in chunks])

    @property
    def number_of_documents(self) -> int:
        """Number of documents."""
        return int(self._counts[-1])

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Returns (first token, number of tokens) of documents, which are numbered in the stream's order; (N, 2) int64."""
        chunks = np.searchsorted(self._counts, indices, side="right")
        if self.remote is not None:
            self.remote.fetch_headers(np.unique(chunks).tolist())
        within = indices - (self._counts - self._items)[chunks]
        order = np.argsort(chunks, kind="stable")  # each header is looked up once
        known, first = np.unique(chunks[order], return_index=True)
        bounds = np.empty((2, len(indices)), np.int64)  # in bytes of the stream
        for chunk, (low, high) in zip(known.tolist(), pairwise([*first.tolist(), len(order)]), strict=True):
            offsets, mine = self._offsets[chunk], order[low:high]
            numbers = within[mine]
            base = offsets.item(0) - self._start_list[chunk] * self._itemsize
            bounds[0, mine], bounds[1, mine] = offsets[numbers], offsets[numbers + 1]
            bounds[:, mine] -= base
        begins, ends = bounds // self._itemsize
        return np.stack([begins, ends - begins], axis=1)

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions in [start, stop) at which documents begin, int64; `len` counts as one."""
        chunk = bisect_right(self._end_list, start)
        pieces = []
        while chunk < len(self._chunks) and (at := self._start_list[chunk]) < stop:
            offsets = self._offsets[chunk]
            base = int(offsets[0]) - at * self._itemsize  # in bytes, as in the header
            low = bisect_left(offsets, base + start * self._itemsize, 0, len(offsets) - 1)
            high = bisect_left(offsets, base + stop * self._itemsize, low, len(offsets) - 1)
            pieces.append((offsets[low:high].astype(np.int64) - base) // self._itemsize)
            chunk += 1
        if start <= len(self) < stop:
            pieces.append(np.array([len(self)]))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def parts_between(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns the documents in [start, stop): number in the stream, offset in the document, tokens."""
        parts = []
        for chunk in self.chunks_between(start, stop):
            offsets, size = self._offsets[chunk], self._itemsize
            base = int(offsets[0]) - self._start_list[chunk] * size  # in bytes, as in the header
            first = int(self._counts[chunk] - self._items[chunk])
            low = max(bisect_right(offsets, base + start * size) - 1, 0)
            high = bisect_left(offsets, base + stop * size, low, len(offsets) - 1)
            begins = ((offsets[low : high + 1].astype(np.int64) - base) // size).tolist()
            for number, (at, end) in enumerate(pairwise(begins), first + low):
                begin, end = max(start, at), min(stop, end)
                if end > begin:
                    parts.append((number, begin - at, end - begin))
        return parts

    def copy(self, first: int, inputs: np.ndarray, labels: np.ndarray) -> bool:
        """Copies len(inputs) tokens from `first` on, and the one after each; -1 past the end.

        Returns:
            Whether all of them exist.
        """
        chunk, size = bisect_right(self._end_list, first), len(inputs)
        if chunk < len(self._chunks):
            begin = first - self._start_list[chunk]
            tokens = self._chunks[chunk][begin : begin + size + 1]
            if len(tokens) == size + 1:
                self._require_whole(chunk, begin, begin + size + 1)
                self._require_ids(tokens)
                inputs[:], labels[:] = tokens[:-1], tokens[1:]
                return True
        tokens = self.read(first, first + size + 1).astype(np.int64)
        tokens = np.pad(tokens, (0, size + 1 - len(tokens)), constant_values=-1)
        inputs[:], labels[:] = tokens[:-1], tokens[1:]
        return bool(tokens[-1] >= 0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens at positions [start, stop), of the stored type; fewer where the stream ends."""
        pieces = []
        for chunk in self.chunks_between(start, stop):
            begin, end = max(0, start - self._start_list[chunk]), stop - self._start_list[chunk]
            tokens = self._chunks[chunk][begin:end]
            if len(tokens):
                self._require_whole(chunk, begin, begin + len(tokens))
            pieces.append(tokens)
        found = np.concatenate([self._none, *pieces])
        self._require_ids(found)
        return found

    def _require_ids(self, tokens: np.ndarray) -> None:
        if self._signed and len(tokens) and int(tokens.min()) < 0:
            raise ConfigError(f"{self.folder} is damaged: it has the token id {int(tokens.min())}.")

    def _require_whole(self, chunk: int, begin: int, end: int) -> None:
        """Has some tokens of a chunk read, and checks those of a local one's blocks that were not read before."""
        at, size = self._begins[chunk], self._itemsize
        if self.remote is not None:
            self.remote.require(chunk, at + begin * size, at + end * size)
        elif self._local is not None:
            self._local.require(self._low + chunk, at + begin * size, at + end * size, self._checks)
            if self._checks and not self._checks.left:
                self._checks = None

    def chunks_between(self, start: int, stop: int) -> range:
        """Returns the numbers of the chunks that hold the tokens at positions [start, stop)."""
        last = min(bisect_right(self._end_list, stop - 1), len(self._end_list) - 1)
        return range(bisect_right(self._end_list, start), last + 1)

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of remote chunks, in bytes; 0 for a local folder."""
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


def _between(offsets: np.ndarray, low: int, high: int, itemsize: int) -> np.ndarray:
    """Returns the offsets of the documents in the tokens [low, high) of a chunk."""
    first, stop = (int(offsets[0]) + at * itemsize for at in (low, high))
    inside = offsets[(offsets > first) & (offsets < stop)]
    return np.concatenate([[first], inside, [stop]]).astype(np.uint32)
