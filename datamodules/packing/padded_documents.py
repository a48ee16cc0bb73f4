"""One document per row, batched with documents of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.contracts import PackedBatches, Packing
from core.technique import technique
from datamodules.packing.concatenate import Segment
from datamodules.packing.grouped import GroupedBatches, Row
from datamodules.packing.token_store import TokenStore

BUCKET = 256
"""Rows of similar length that are shuffled together, out of the 2,048 documents that are sorted together."""

MULTIPLE = 8
"""Rows are padded to a multiple of this number of tokens."""


class PaddedBatches(GroupedBatches):
    """Batches whose rows hold one piece each, padded to the longest of them."""

    def pack(self, pieces: list[Segment], length: int, random: np.random.Generator) -> list[Row]:
        """Sorts the pieces by length; shuffles buckets of them, and the rows in each."""
        rows: list[Row] = [[piece] for piece in sorted(pieces, key=lambda piece: piece[1])]
        if not self.shuffle:
            return rows
        buckets = [rows[at : at + BUCKET] for at in range(0, len(rows), BUCKET)]
        return [
            buckets[bucket][row]
            for bucket in random.permutation(len(buckets))
            for row in random.permutation(len(buckets[bucket]))
        ]

    def count(self, sizes: np.ndarray, length: int) -> int:
        """Returns how many rows there are: one for each piece."""
        return len(sizes)

    def width(self, rows: Sequence[Row]) -> int:
        """Returns the longest row's length, rounded up."""
        longest = max(size for row in rows for _, size in row)
        return min(self.sequence_length, -(-longest // MULTIPLE) * MULTIPLE)


@technique(paper="length bucketing: Khomenko et al., arXiv:1708.05604")
class PaddedDocuments(Packing):
    """One document per row, padded to the longest in its batch; documents longer than a row are cut.

    Batches hold documents of similar length: 2,048 at a time are sorted and shuffled in buckets of 256.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            packing: PaddedDocuments
    """

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches; see :class:`core.contracts.Packing`."""
        return PaddedBatches(TokenStore(folder), **order)
