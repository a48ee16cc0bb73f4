"""Fetches the chunks of the next batches in the background, for tokens on object storage."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from torch.utils.data import get_worker_info

from core.contracts import Batch, PackedBatches
from core.errors import ConfigError
from datamodules.packing.remote_chunks import RemoteChunks

Chunk = tuple[RemoteChunks, int]

BATCHES = 512
"""Most batches that a process looks ahead; fewer if their chunks exceed its share of half the cache."""

THREADS = 4


class Prefetching(PackedBatches):
    """Batches that may come from remote folders: each process prefetches the chunks of its own batches.

    Rows and cursors are known before anything is read, so that looking ahead only costs a second call of
    :meth:`take`, and nothing for local folders.
    """

    @abstractmethod
    def chunks(self, rows: Sequence[Any], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of remote folders that a slice of the rows of a global batch needs."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Returns the size of the cache in bytes; 0 if nothing is remote."""

    def __iter__(self) -> Iterator[tuple[Any, Batch]]:
        """Yields the cursor after each batch, and the batch."""
        batches = super().__iter__()
        return self._fetching_ahead(batches) if self.cache_bytes() else batches

    def _fetching_ahead(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Batch]]:
        queue: SimpleQueue[Chunk | None] = SimpleQueue()
        for _ in range(THREADS):
            Thread(target=_fetch, args=(queue,), daemon=True).start()
        scout = _Scout(self, queue)
        try:
            while True:
                scout.advance()
                if (item := next(batches, None)) is None:
                    return
                yield item
        finally:
            with suppress(Empty):
                while True:  # drop the chunks that are no longer needed
                    queue.get_nowait()
            for _ in range(THREADS):
                queue.put(None)


class _Scout:
    """Iterates over the rows ahead of the reader and queues the chunks that they need.

    Args:
        batches: The batches that the reader reads.
        queue: Receives the chunks.
    """

    def __init__(self, batches: Prefetching, queue: SimpleQueue[Chunk | None]) -> None:
        self.batches, self.queue, self.cursor = batches, queue, batches.cursor
        worker = get_worker_info()
        self.turn, self.workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self.most = batches.cache_bytes() // (2 * self.workers * batches.world_size)
        self.ahead: deque[dict[Chunk, None]] = deque()
        self.needed: Counter[Chunk] = Counter()
        self.number = 0

    def advance(self) -> None:
        """Follows the reader by one batch, and looks up to two more batches ahead."""
        if self.ahead:
            gone = self.ahead.popleft().keys()
            self.needed.subtract(gone)
            for chunk in gone:
                if not self.needed[chunk]:
                    del self.needed[chunk]
        for _ in range(2):
            if self.ahead and (len(self.ahead) >= BATCHES or self._bytes() > self.most):
                return
            self._look()

    def _bytes(self) -> int:
        return sum(chunks.sizes[number] for chunks, number in self.needed)

    def _look(self) -> None:
        batches = self.batches
        own = slice(batches.rank * batches.batch_size, (batches.rank + 1) * batches.batch_size)
        while True:
            rows, self.cursor = batches.take(self.cursor, batches.batch_size * batches.world_size)
            self.number += 1
            if not rows or (self.number - 1) % self.workers == self.turn:
                break
        wanted = dict.fromkeys(batches.chunks(rows, own))
        for chunk in wanted:
            if chunk not in self.needed:
                self.queue.put(chunk)
        self.needed.update(wanted.keys())
        self.ahead.append(wanted)


def _fetch(queue: SimpleQueue[Chunk | None]) -> None:
    while (chunk := queue.get()) is not None:
        chunks, number = chunk
        with suppress(ConfigError):  # the reader gets the same error and raises it
            chunks.remote.fetch(chunks.names[number])
