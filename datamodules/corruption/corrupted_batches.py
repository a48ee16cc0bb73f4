"""Batches whose rows are changed as they are read: tokens masked, spans taken out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches
from datamodules.packing.prefetching import Chunk, Prefetching

TRAINING, VALIDATION = 0, 1
"""What the random numbers of a row begin with, beside the seed."""


class Tokens(NamedTuple):
    """A row as the packing made it, without its padding.

    Attributes:
        ids: Its token ids, (n,).
        document_ids: As in :class:`core.contracts.Batch`, (n,); None: the row is one document.
        position_ids: (n,); None: they count from 0.
    """

    ids: np.ndarray
    document_ids: np.ndarray | None = None
    position_ids: np.ndarray | None = None


class Corruption(ABC):
    """Makes rows of a batch from rows of tokens."""

    @abstractmethod
    def raw_length(self, sequence_length: int) -> int:
        """Returns how many tokens are read for a row of `sequence_length`."""

    @abstractmethod
    def batch(
        self, rows: Sequence[Tokens], generators: Sequence[np.random.Generator], raw_length: int
    ) -> Batch:
        """Returns the batch of these rows.

        Args:
            rows: Those that are shorter than `raw_length` are padded; without tokens they are padding alone.
            generators: For each row one of its own.
            raw_length: Tokens of the longest row.
        """


class CorruptedBatches(Prefetching):
    """One rank's batches of a packing, each row changed with random numbers of its own.

    Row n of a run has a generator of (seed, n): another in each epoch, and the same after a resume, on any number of
    ranks and workers. Padded batches, as for validation, begin with row 0 in each pass, so that each pass is the same.

    Args:
        parts: The rows, as the packing makes them.
        corruption: Changes each row.
        seed: Seed of the generators.
    """

    def __init__(self, parts: PackedBatches, corruption: Corruption, seed: int) -> None:
        self.parts, self.corruption, self.seed = parts, corruption, seed
        self.cursor = {"rows": 0, "parts": parts.cursor}
        self.rank, self.world_size, self.pad = parts.rank, parts.world_size, parts.pad
        self.sequence_length, self.batch_size = parts.sequence_length, parts.batch_size

    def _shaped(self) -> PackedBatches:
        self.parts.sequence_length = self.corruption.raw_length(self.sequence_length)
        self.parts.batch_size = self.batch_size
        return self.parts

    def __len__(self) -> int:
        return len(self._shaped())

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return self.parts.order()

    def epochs(self, cursor: Any) -> dict[str, float]:
        """Returns the number of epochs up to a cursor."""
        return self._shaped().epochs(cursor["parts"])

    def padding(self) -> dict[str, float]:
        """Returns an estimate of the share of padding in the rows."""
        return self._shaped().padding()

    def take(self, cursor: Any, count: int) -> tuple[list[tuple[int, Any]], dict[str, Any]]:
        """Returns (number in the run, row) of the next rows."""
        rows, after = self._shaped().take(cursor["parts"], count)
        first = cursor["rows"]
        return list(enumerate(rows, first)), {"rows": first + len(rows), "parts": after}

    def read(self, rows: Sequence[tuple[int, Any]], own: slice) -> Batch:
        """Returns a slice of the rows as a batch."""
        batch = self._shaped().read([row for _, row in rows], own)
        # the batch is on the host: this waits for no device
        found = {name: np.from_dlpack(value) for name, value in cast(dict[str, torch.Tensor], batch).items()}
        numbers = [number for number, _ in rows[own]]
        numbers += [0] * (self.batch_size - len(numbers))
        split = VALIDATION if self.pad else TRAINING
        generators = [np.random.default_rng((self.seed, split, number)) for number in numbers]
        present = len(rows[own])
        tokens = [
            _without_padding({name: value[index] for name, value in found.items()}, index < present)
            for index in range(self.batch_size)
        ]
        return self.corruption.batch(tokens, generators, found["input_ids"].shape[1])

    def chunks(self, rows: Sequence[tuple[int, Any]], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of a remote folder that a slice of rows needs."""
        if isinstance(self.parts, Prefetching):
            yield from self.parts.chunks([row for _, row in rows], own)

    def cache_bytes(self) -> int:
        """Returns the size of the cache in bytes; 0 if nothing is remote."""
        return self.parts.cache_bytes() if isinstance(self.parts, Prefetching) else 0


def _without_padding(row: dict[str, np.ndarray], is_present: bool) -> Tokens:
    """Returns a row's tokens. Padding is all that follows the first of the trailing labels that are ignored."""
    labelled = np.flatnonzero(row["labels"] != IGNORED_LABEL)
    size = min(int(labelled[-1]) + 2 if len(labelled) else 1, len(row["labels"])) if is_present else 0
    documents, places = (row.get(name) for name in ("document_ids", "position_ids"))
    return Tokens(
        row["input_ids"][:size],
        None if documents is None else documents[:size],
        None if places is None else places[:size],
    )


def padded(rows: Sequence[np.ndarray], width: int, fill: int) -> torch.Tensor:
    """Returns rows of at most `width` values as one tensor, (B, width) int64, filled up behind them."""
    found = np.full((len(rows), width), fill, np.int64)
    for index, row in enumerate(rows):
        found[index, : len(row)] = row
    return torch.from_numpy(found)
