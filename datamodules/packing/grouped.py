"""Rows made of complete documents, a group of documents at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from core.contracts import Batch
from datamodules.packing.concatenate import Segment, to_batch
from datamodules.packing.permutation import Permutation
from datamodules.packing.prefetching import Chunk
from datamodules.packing.stored_batches import StoredBatches
from toolkit.document_places import Place

GROUP = 2048
"""Documents that are packed together: more leave less padding and take more memory."""

SAMPLE = 8
"""Groups from which the length of a pass is estimated."""

ORDERED = 16
"""Successive groups whose place in the order is computed at once, which costs less for each."""

REMEMBERED = 4
"""Packed groups kept in memory: for the reader and for the prefetcher ahead of it, before and after a change of T."""

Row = Sequence[Segment]
Taken = tuple[tuple[int, int], ...]
"""(sequence_length, rows) pairs: how many rows of each length were taken from a group, in order."""

Packed = tuple[int, Taken, int]
"""Group, what was taken from it at earlier lengths, and the current length."""


class _Group:
    """The rows that are left of a group: how many there are, and which, once a row of it is looked at.

    Args:
        count: How many there are.
        pack: Returns them.
    """

    def __init__(self, count: int, pack: Callable[[], list[Row]]) -> None:
        self.count, self._pack = count, pack

    @cached_property
    def rows(self) -> list[Row]:
        return self._pack()


class GroupRow(Sequence[Segment]):
    """A row that is packed with its group when it is looked at: a rank looks at its own."""

    __slots__ = ("group", "number")

    def __init__(self, group: _Group, number: int) -> None:
        self.group, self.number = group, number

    def __len__(self) -> int:
        return len(self.group.rows[self.number])

    def __getitem__(self, at: Any) -> Any:
        return self.group.rows[self.number][at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class GroupedBatches(StoredBatches):
    """One rank's batches of documents that are packed into rows, group by group.

    The order of documents is drawn for each epoch; each successive group of them is cut into pieces of at most T
    tokens and packed. Where a group begins depends on how many rows the groups before it have: each rank counts those of
    all groups, by the lengths of their documents, and packs the groups in which it has rows.

    When T changes within a group, the rows not yet taken from it are packed again: a
    change costs one packing, and resuming costs one for each earlier change in the group.
    """

    def __post_init__(self) -> None:
        self.documents = self.store.number_of_documents
        self.groups = -(-self.documents // GROUP)
        self.cursor: dict[str, Any] = {"group": 0, "taken": []}
        self._remember()

    def _remember(self) -> None:
        self._packed: OrderedDict[Packed, list[Row]] = OrderedDict()
        self._documents = lru_cache(4)(self.documents_of)
        self._ordered = lru_cache(2)(self._order_of)
        self._counted = lru_cache(1024)(self._count)
        self._sampled = lru_cache(4)(self._sample)

    def __getstate__(self) -> dict[str, Any]:
        caches = ("_packed", "_documents", "_ordered", "_counted", "_sampled")
        return {name: value for name, value in vars(self).items() if name not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._remember()

    @abstractmethod
    def pack(self, pieces: list[Segment], length: int, random: np.random.Generator) -> list[Row]:
        """Puts pieces of at most `length` tokens into rows; returns the rows in the order of training."""

    @abstractmethod
    def count(self, sizes: np.ndarray, length: int) -> int:
        """Returns how many rows :meth:`pack` makes of pieces of these sizes, (N,) int64."""

    def order(self) -> dict[str, Any]:
        """Returns what a cursor depends on."""
        return {
            "documents": self.documents,
            "tokens": len(self.store),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def __len__(self) -> int:
        (groups, rows, _), global_batch = (
            self._sampled(self.sequence_length),
            self.batch_size * self.world_size,
        )
        rows = rows * self.groups // groups
        return -(-rows // global_batch) if self.pad else rows // global_batch

    def _sample(self, length: int) -> tuple[int, int, int]:
        """Returns the number of groups sampled, and of rows and tokens in them."""
        # padded batches need an exact count; training only needs an estimate
        groups = self.groups if self.pad else min(self.groups, SAMPLE)
        sizes = [self.sizes(self.documents_of(group), length) for group in range(groups)]
        return groups, sum(self.count(one, length) for one in sizes), sum(int(one.sum()) for one in sizes)

    def _count(self, group: int, length: int) -> int:
        return self.count(self.sizes(self._documents(group), length), length)

    def epochs(self, cursor: dict[str, Any]) -> dict[str, float]:
        """Returns the number of epochs up to a cursor; each group counts equally, part of a group by its tokens."""
        group, taken = cursor["group"], tuple(map(tuple, cursor["taken"]))
        left, done = self._left(group, taken)
        share = _tokens(left.rows[done:]) / int(self._documents(group)[:, 1].sum()) if taken else 1.0
        return {"all": (group + 1 - share) / self.groups}

    def take(self, cursor: dict[str, Any], count: int) -> tuple[list[Row], dict[str, Any]]:
        """Returns the parts of the store of each row."""
        group, taken = cursor["group"], tuple(map(tuple, cursor["taken"]))
        rows: list[Row] = []
        while len(rows) < count and not (self.pad and group >= self.groups):
            left, done = self._left(group, taken)
            history = taken[:-1] if done else taken
            end = min(left.count, done + count - len(rows))
            rows += [GroupRow(left, number) for number in range(done, end)]
            if end > done:
                taken = (*history, (self.sequence_length, end))
            if end >= left.count:
                group, taken = group + 1, ()
        return rows, {"group": group, "taken": [list(pair) for pair in taken]}

    def _left(self, group: int, taken: Taken) -> tuple[_Group, int]:
        """Returns a group's rows of the current length, and how many of them have been taken."""
        length, done = self.sequence_length, 0
        if taken and taken[-1][0] == length:
            taken, done = taken[:-1], taken[-1][1]
        # what an earlier length has left is known by packing alone
        count = len(self._rows(group, taken, length)) if taken else self._counted(group, length)
        return _Group(count, lambda: self._rows(group, taken, length)), done

    def read(self, rows: Sequence[Row], own: slice) -> Batch:
        """Returns a slice of the rows as a batch; the width is that of the longest row of all."""
        chosen = [*rows[own]]
        chosen += [[]] * (self.batch_size - len(chosen))
        return self.marked(to_batch(self.store, chosen, self.width(rows), mask_documents=True), chosen)

    def chunks(self, rows: Sequence[Row], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of a remote folder that a slice of rows needs."""
        return self.store.remote_chunks(chain.from_iterable(rows[own]))

    def places(self, rows: Sequence[Row], own: slice) -> list[Place]:
        """Returns the documents in a slice of rows: see :class:`toolkit.document_places.LocatesDocuments`."""
        return self.places_in(rows[own])

    def _rows(self, group: int, history: Taken, length: int) -> list[Row]:
        """Returns the rows that are left of a group after `history` was taken from it, packed to `length`.

        The rows before the last change are usually cached, so that only one packing is needed.
        """
        known, turns = len(history), (*history, (length, 0))
        while known > 0 and (group, history[:known], turns[known][0]) not in self._packed:
            known -= 1
        packed: list[Row] = []
        for turn in range(known, len(turns)):
            key = group, history[:turn], turns[turn][0]
            if key not in self._packed:
                if not turn:
                    pieces = list(map(tuple, self._documents(group).tolist()))
                else:
                    pieces = list(chain.from_iterable(packed[history[turn - 1][1] :]))
                self._packed[key] = self._pack(pieces, group, turn, turns[turn][0])
            self._packed.move_to_end(key)
            packed = self._packed[key]
            if len(self._packed) > REMEMBERED:
                self._packed.popitem(last=False)
        return packed

    def _pack(self, pieces: list[Segment], group: int, turn: int, length: int) -> list[Row]:
        """Cuts pieces to `length` tokens and packs them; `turn` is the number of earlier changes of length."""
        random = np.random.default_rng((self.seed, *divmod(group, self.groups), turn))
        return self.pack(self.cut(pieces, length), length, random)

    def cut(self, pieces: list[Segment], length: int) -> list[Segment]:
        """Returns pieces of at most `length` tokens."""
        return [
            (first + at, min(length, size - at)) for first, size in pieces for at in range(0, size, length)
        ]

    def sizes(self, documents: np.ndarray, length: int) -> np.ndarray:
        """Returns the sizes of the pieces into which :meth:`cut` cuts documents, in any order."""
        full, rest = np.divmod(documents[:, 1], length)
        return np.concatenate([np.full(full.sum(), length), rest[rest > 0]])

    def documents_of(self, group: int) -> np.ndarray:
        """Returns the documents of a group, (N, 2) int64: pieces that are not cut yet."""
        epoch, number = divmod(group, self.groups)
        several, place = divmod(number, ORDERED)
        return self.store.documents(self._ordered(epoch, several)[place * GROUP : (place + 1) * GROUP])

    def _order_of(self, epoch: int, number: int) -> np.ndarray:
        """Returns the numbers of the documents of `ORDERED` successive groups."""
        first = number * ORDERED * GROUP
        indices = np.arange(first, min(first + ORDERED * GROUP, self.documents))
        return Permutation(self.documents, (self.seed, epoch)).map(indices) if self.shuffle else indices


def _tokens(rows: list[Row]) -> int:
    return sum(size for row in rows for _, size in row)
