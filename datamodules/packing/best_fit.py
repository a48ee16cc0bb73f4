"""Rows of complete documents with as little padding as possible: best-fit decreasing."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from core.contracts import PackedBatches, Packing
from core.technique import technique
from datamodules.packing.concatenate import Segment
from datamodules.packing.grouped import GroupedBatches, Row
from datamodules.packing.token_store import TokenStore


class BestFitBatches(GroupedBatches):
    """Batches whose rows are filled by best-fit decreasing."""

    def pack(self, pieces: list[Segment], length: int, random: np.random.Generator) -> list[Row]:
        """Puts each piece, longest first, into the row where it leaves the least room."""
        rows: list[list[Segment]] = []
        # Room left in tokens, and the number of the row: one number for both compares faster than a pair.
        places = 1 << len(pieces).bit_length()
        free: list[int] = []  # sorted
        for piece in sorted(pieces, key=itemgetter(1), reverse=True):
            at = bisect_left(free, piece[1] * places)
            if at < len(free):
                place = free.pop(at)
                rows[place % places].append(piece)
            else:
                place = length * places + len(rows)
                rows.append([piece])
            if (left := place - piece[1] * places) >= places:
                insort(free, left)
        return [rows[row] for row in random.permutation(len(rows))] if self.shuffle else [*rows]

    def count(self, sizes: np.ndarray, length: int) -> int:
        """Returns how many rows there are: by the room that is left in each, without what is in them."""
        if not len(sizes):
            return 0
        sizes = np.sort(sizes)[::-1]
        rows, smallest = int((sizes > length // 2).sum()), int(sizes[-1])  # no two of these share a row
        free = [0, *(length - sizes[:rows]).tolist()]  # sorted, as in `pack`
        for size in sizes[rows:].tolist():
            at = bisect_left(free, size)
            if at == len(free):
                free.append(length)
                rows += 1
            left = free[at] - size
            if free[at - 1] <= left:
                free[at] = left
            else:
                del free[at]
                if left >= smallest:
                    insort(free, left, 0, at)
        return rows

    def padding(self) -> dict[str, float]:
        """Returns an estimate of the share of padding in the rows."""
        _, rows, tokens = self._sampled(self.sequence_length)
        return {"all": 1 - tokens / (rows * self.sequence_length)}


@technique(paper="Fewer Truncations Improve Language Modeling, arXiv:2404.10830, section 3: best-fit packing")
class BestFit(Packing):
    """Best-fit packing: complete documents in rows with little padding; only those longer than a row are cut.

    Documents in a row are separate: attention and positions restart with each (`document_ids`, `position_ids`), and
    the last token of a document has no label. 2,048 documents at a time are packed together. The share of padding is
    printed when training starts. Each rank counts the rows of the global batch, less than 1 ms for a million tokens, and packs
    and reads its own.

    Example:
        data:
          class_path: PretrainDataModule
          init_args:
            packing: BestFit
    """

    def batches(self, folder: Path, **order: Any) -> PackedBatches:
        """Returns one rank's batches; see :class:`core.contracts.Packing`."""
        return BestFitBatches(TokenStore(folder), **order)
