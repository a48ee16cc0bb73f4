"""Deals out stored tokens: one stream, cut into rows, ordered by epoch, sliced by ranks and workers.

The chunks are litdata's; the order is not. litdata cuts each chunk into blocks of its own and counts
positions per worker, which loses chunk tails, and repeats and skips data when ranks or workers change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.contracts import IGNORED_LABEL, Batch
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

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns `length` tokens from each start on, (len(starts), length) int64; -1 past the end."""
        result = np.empty((len(starts), length), np.int64)
        chunks = np.minimum(np.searchsorted(self._ends, starts, side="right"), len(self._chunks) - 1)
        local = starts - self._starts[chunks]
        for row, chunk, begin, start in zip(
            result, chunks.tolist(), local.tolist(), starts.tolist(), strict=True
        ):
            tokens = self._chunks[chunk][begin : begin + length]
            if len(tokens) < length:
                tokens = self.read(start, start + length)
                row[len(tokens) :] = -1
            row[: len(tokens)] = tokens
        return result


def _map(path: Path, size: int, items: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns a chunk's byte offsets and tokens, both mapped; ValueError if it is not as announced."""
    raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    if len(raw) != size:
        raise ValueError(f"it has {len(raw):,} bytes, index.json says {size:,}")
    header = raw[: 4 * (items + 2)].view(np.uint32)
    if (header[0], header[1], header[-1]) != (items, header.nbytes, size):
        raise ValueError(f"its header does not describe {items} items in {size:,} bytes")
    return header[1:], raw[header.nbytes :].view(dtype)


@dataclass(eq=False)
class TokenBatches(IterableDataset):
    """One rank's batches of one epoch.

    Row i holds tokens [i T, i T + T] of the stream: the first T are `input_ids`, the last T `labels`, so
    that rows share one token and none is lost. A global batch is `batch_size * world_size` successive
    rows of the epoch's order; each rank takes its slice of them, each worker its turn.

    Args:
        store: The tokens.
        sequence_length: T, in tokens.
        batch_size: Rows of this rank's batch.
        rank: This rank among the data-parallel ones.
        world_size: Number of data-parallel ranks.
        shuffle: Whether an epoch's order is a permutation drawn from (seed, epoch), or the stream's.
        seed: Of the permutations; at least 0.
        pad: Whether the stream's last, shorter row and the last, smaller global batch are filled up with
            labels that are ignored, or left out.
    """

    store: TokenStore
    sequence_length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    seed: int = 0
    pad: bool = False

    def __post_init__(self) -> None:
        self.global_batch = self.batch_size * self.world_size
        up = self.pad
        self.rows = (len(self.store) - 1 + up * (self.sequence_length - 1)) // self.sequence_length
        self._length = (self.rows + up * (self.global_batch - 1)) // self.global_batch
        self.epoch = self.first = 0  # which epoch the next pass is, and its first batch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(self.rows) if self.shuffle else None
        for batch in range(self.first + turn, len(self), workers):
            begin = batch * self.global_batch + self.rank * self.batch_size
            rows = np.arange(begin, begin + self.batch_size)
            yield self._batch(rows if order is None else order[rows])

    def _batch(self, rows: np.ndarray) -> Batch:
        tokens = self.store.windows(rows * self.sequence_length, self.sequence_length + 1)
        inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        if self.pad:
            inputs, labels = np.maximum(inputs, 0), np.where(labels < 0, IGNORED_LABEL, labels)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


class TokenLoader:
    """Hands out `TokenBatches`, with or without worker processes, and knows how far it has come.

    Lightning saves and restores the position with the checkpoint and says which epoch begins; elsewhere
    each complete pass is followed by the next epoch's. A pass begins with its epoch's first batch, the
    first pass after `load_state_dict` with the first batch that had not been handed out.

    Args:
        batches: What is handed out.
        num_workers: Worker processes that read ahead; the batches and their order do not depend on it.
        pin_memory: Whether batches lie in page-locked memory, for faster copies to a CUDA device.
    """

    def __init__(self, batches: TokenBatches, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.batches, self.num_workers, self.pin_memory = batches, num_workers, pin_memory
        self.batch_size = batches.batch_size
        self._epoch = self._done = self._resume_at = 0
        self._announced: int | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that nothing is settled before the first batch is asked for: Lightning calls
        # iter() ahead of set_epoch().
        self._done, self._resume_at = self._resume_at, 0
        self.batches.epoch, self.batches.first = self._epoch, self._done
        loader = DataLoader(
            self.batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # otherwise each pass draws from the global generator
        )
        for batch in loader:
            self._done += 1
            if self._done == len(self):
                self._epoch, self._done = self._epoch + 1, 0
            yield batch

    @property
    def sampler(self) -> TokenLoader:
        """Where Lightning looks for `set_epoch`, and DeepSpeed for `batch_size`."""
        return self

    batch_sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Says that an epoch begins: what is left of the present one (`limit_train_batches`) is passed over.

        The number counts only at the very first: when Lightning resumes from a checkpoint that was written
        at the end of an epoch, with `max_steps`, it announces one epoch too many.
        """
        if self._announced is None:
            self._epoch = epoch
        elif epoch > self._announced and self._done:
            self._epoch, self._done, self._resume_at = self._epoch + 1, 0, 0
        self._announced = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, how many of its rows all ranks together were handed, and what orders them."""
        names = ("rows", "global_batch", "sequence_length", "shuffle", "seed")
        return {
            "epoch": self._epoch,
            "rows": self._done * self.batches.global_batch,
            "announced": self._announced,
            "order": {name: getattr(self.batches, name) for name in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after what had been handed out when the state was taken.

        Raises:
            ConfigError: If that lies within an epoch of another order.
        """
        then, now = state["order"], self.state_dict()["order"]
        if state["rows"] and then != now:
            lines = [
                f"  {name}: {then.get(name)} then, {now[name]} now"
                for name in now
                if then.get(name) != now[name]
            ]
            raise ConfigError(
                "The checkpoint was written within an epoch that this run would cut or order otherwise, so "
                "that\nsome rows would come twice and others never:\n" + "\n".join(lines) + "\n"
                "Take the old values back."
            )
        self._epoch, self._announced = state["epoch"], state["announced"]
        self._done = self._resume_at = state["rows"] // self.batches.global_batch
