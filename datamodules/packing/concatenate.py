"""Rows cut from one stream of all documents: nothing is lost, nothing is padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from core.contracts import IGNORED_LABEL, Batch, PackedBatches, Packing
from core.technique import technique
from datamodules.packing.token_store import TokenStore


@dataclass(eq=False)
class ConcatenatedBatches(PackedBatches):
    """One rank's batches of one epoch.

    Row i holds tokens [i T, i T + T] of the stream: the first T are `input_ids`, the last T `labels`, so
    that rows share one token and none is lost. A global batch is `batch_size * world_size` successive
    rows of the epoch's order; each rank takes its slice of them, each worker its turn.

    Args:
        store: The tokens.
        sequence_length: T, in tokens; this and the following as in :class:`core.contracts.Packing`.
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


@technique(
    paper="GPT-3, arXiv:2005.14165, appendix B: rows are always full, documents follow each other in them",
    maturity="stable",
)
class Concatenate(Packing):
    """Cuts the stream of all documents into rows of `sequence_length`, wherever documents end.

    Each row is full; a row may hold several documents, which then see each other.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            packing: Concatenate
    """

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches; see :class:`core.contracts.Packing`."""
        return ConcatenatedBatches(TokenStore(folder), **order)
