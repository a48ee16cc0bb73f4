"""Rows cut from one stream of all documents, without padding and without losing tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from core.contracts import IGNORED_LABEL, Batch, PackedBatches, Packing
from core.technique import technique
from datamodules.packing.permutation import Permutation
from datamodules.packing.prefetching import Chunk
from datamodules.packing.stored_batches import StoredBatches
from datamodules.packing.token_store import TokenStore
from datamodules.packing.token_window import TokenWindow
from toolkit.document_places import Place

Segment = tuple[int, int]
"""Position of the first token in the store, and number of tokens."""


@dataclass(eq=False)
class ConcatenatedBatches(StoredBatches):
    """One rank's batches of a stream that continues across epochs.

    An epoch is every token once (except the last, which has no label), in blocks whose order is drawn for each
    epoch. The position is a number of tokens, from which rows of any length continue: a row is cut from successive
    blocks, and the label of a token is the one that follows it in the store, also at the end of a block. A global
    batch is `batch_size * world_size` successive rows; each rank takes its slice, each worker its turn.

    Args:
        mask_documents: See :class:`Concatenate`; the other arguments are those of :class:`StoredBatches`. The blocks
            of a run are as long as its first rows.
    """

    mask_documents: bool = False
    _orders: dict[int, Permutation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = len(self.store) - 1
        self._block = self.sequence_length
        self.cursor = {"tokens": 0, "block": self._block}

    def __len__(self) -> int:
        step = self.sequence_length * self.batch_size * self.world_size
        return -(-self.tokens // step) if self.pad else self.tokens // step

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return {"tokens": self.tokens, "shuffle": self.shuffle, "seed": self.seed}

    def epochs(self, cursor: dict[str, int]) -> dict[str, float]:
        """Returns the number of epochs up to a cursor."""
        return {"all": cursor["tokens"] / self.tokens}

    def take(self, cursor: dict[str, int], count: int) -> tuple[range, dict[str, int]]:
        """Returns the first position of each row."""
        begin, length = cursor["tokens"], self.sequence_length
        end = begin + count * length
        rows = range(begin, min(end, self.tokens) if self.pad else end, length)
        self._block = cursor["block"]
        return rows, {"tokens": end, "block": cursor["block"]}

    def read(self, rows: Sequence[int], own: slice) -> Batch:
        """Returns the rows of a slice as a batch."""
        parts = self._parts(rows[own])
        parts += [[]] * (self.batch_size - len(parts))
        return self.marked(to_batch(self.store, parts, self.sequence_length, self.mask_documents), parts)

    def chunks(self, rows: Sequence[int], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of a remote folder that a slice of rows needs."""
        return self.store.remote_chunks(chain.from_iterable(self._parts(rows[own])))

    def places(self, rows: Sequence[int], own: slice) -> list[Place]:
        """Returns the documents in a slice of rows: see :class:`toolkit.document_places.LocatesDocuments`."""
        return self.places_in(self._parts(rows[own]))

    def _parts(self, rows: Sequence[int]) -> list[list[Segment]]:
        """Returns the parts of the store that each row consists of."""
        if self.pad:
            return [[(row, self.sequence_length)] for row in rows]
        return [_joined(self._segments(row, self.sequence_length)) for row in rows]

    def _segments(self, position: int, length: int) -> Iterator[Segment]:
        """Yields the parts of the store that make up `length` tokens of the stream from a position on."""
        block = self._block
        while length:
            epoch, within = divmod(position, self.tokens)
            number, offset = divmod(within, block)
            blocks = self.tokens // block  # full ones; the rest comes last in every epoch
            if number >= blocks or not self.shuffle:
                first, size = within, self.tokens - within
            else:
                first, size = self._order(epoch, blocks)(number) * block + offset, block - offset
            size = min(size, length)
            yield first, size
            position, length = position + size, length - size

    def _order(self, epoch: int, blocks: int) -> Permutation:
        if epoch not in self._orders:
            self._orders = {epoch: Permutation(blocks, (self.seed, epoch))}
        return self._orders[epoch]


def _joined(segments: Iterator[Segment]) -> list[Segment]:
    """Returns parts of the store, adjacent ones merged."""
    result: list[Segment] = []
    for first, size in segments:
        if result and sum(result[-1]) == first:
            result[-1] = (result[-1][0], result[-1][1] + size)
        else:
            result.append((first, size))
    return result


def to_batch(
    store: TokenStore | TokenWindow, rows: Sequence[Sequence[Segment]], length: int, mask_documents: bool
) -> Batch:
    """Returns rows that consist of parts of the store as a batch; padding has ignored labels.

    Args:
        store: The tokens.
        rows: The parts of each row, in order.
        length: T, in tokens.
        mask_documents: Whether to add `document_ids` and `position_ids`, which restart with each document and each
            part; the last token of a document then has no label.
    """
    inputs, labels = np.empty((2, len(rows), length), np.int64)
    unmasked = True
    for row, parts in enumerate(rows):
        at = 0
        for first, size in parts:
            unmasked &= store.copy(first, inputs[row, at : at + size], labels[row, at : at + size])
            at += size
        if at < length:
            inputs[row, at:] = labels[row, at:] = -1
            unmasked = False
    ids: dict[str, torch.Tensor] = {}
    if mask_documents:
        begins, unmasked = _document_begins(store, rows, labels), False
        ids["document_ids"] = torch.from_numpy(np.cumsum(begins, axis=1) - 1)
        places = np.arange(length)
        last = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        ids["position_ids"] = torch.from_numpy(places - last)
    if not unmasked:
        inputs, labels = np.maximum(inputs, 0), np.where(labels < 0, IGNORED_LABEL, labels)
    return cast(Batch, {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels), **ids})


def _document_begins(
    store: TokenStore | TokenWindow, rows: Sequence[Sequence[Segment]], labels: np.ndarray
) -> np.ndarray:
    """Returns where a document or a part begins, (B, T) bool; sets the labels before these places to -1."""
    begins = np.zeros(labels.shape, bool)
    for row, parts in enumerate(rows):
        at = 0
        for first, size in parts:
            begins[row, at] = True
            inside = store.starts_between(first + 1, first + size + 1) - first
            labels[row, at + inside - 1] = -1
            begins[row, at + inside[inside < size]] = True
            at += size
        if at < labels.shape[1]:
            begins[row, at] = True
    return begins


@technique(
    paper="GPT-3, arXiv:2005.14165, appendix B: rows are always full, documents follow each other in them",
    maturity="stable",
)
class Concatenate(Packing):
    """Concatenates all documents and cuts the stream into rows of `sequence_length`, wherever documents end.

    Every row is full; a row may hold several documents.

    Args:
        mask_documents: Whether documents in a row are separate: attention and positions restart with each
            (`document_ids`, `position_ids`), and its last token has no label.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            packing: {class_path: Concatenate, init_args: {mask_documents: true}}
    """

    def __init__(self, mask_documents: bool = False) -> None:
        self.mask_documents = mask_documents

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches; see :class:`core.contracts.Packing`."""
        return ConcatenatedBatches(TokenStore(folder), mask_documents=self.mask_documents, **order)
