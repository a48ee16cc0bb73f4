"""Rows made of whole documents, a group of documents at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from core.contracts import Batch
from datamodules.packing.concatenate import Segment, to_batch
from datamodules.packing.permutation import Permutation
from datamodules.packing.prefetching import Chunk, Prefetching
from datamodules.packing.token_store import TokenStore

GROUP = 2048
"""Documents that are packed together: the memory it takes, and the choice that packing has."""

SAMPLE = 8
"""Groups from which the length of a pass is estimated."""

Row = list[Segment]
Taken = tuple[tuple[int, int], ...]
"""(sequence_length, rows) of what has been handed out of a group, in turn."""


@dataclass(eq=False)
class GroupedBatches(Prefetching):
    """One rank's batches of documents that are packed into rows, group by group.

    Documents come in an order drawn anew for each epoch; each successive group of them is cut into pieces of at
    most T tokens and packed. When T changes within a group, what has not been handed out of it is packed anew.

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
        self.documents = self.store.number_of_documents
        self.groups = -(-self.documents // GROUP)
        self.cursor: dict[str, Any] = {"group": 0, "taken": []}
        self._remember()

    def _remember(self) -> None:
        self._rows = lru_cache(4)(self._pack_group)
        self._sampled = lru_cache(4)(self._sample)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_rows", "_sampled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._remember()

    @abstractmethod
    def pack(self, pieces: list[Segment], length: int, random: np.random.Generator) -> list[Row]:
        """Puts pieces of at most `length` tokens into rows, in the order in which they are handed out."""

    def order(self) -> dict[str, Any]:
        """Returns what the meaning of a cursor depends on."""
        return {
            "documents": self.documents,
            "tokens": len(self.store),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def __len__(self) -> int:
        (groups, rows, _), whole = self._sampled(self.sequence_length), self.batch_size * self.world_size
        rows = rows * self.groups // groups
        return -(-rows // whole) if self.pad else rows // whole

    def _sample(self, length: int) -> tuple[int, int, int]:
        """Returns numbers of groups, and of rows and tokens in them."""
        # all groups where that is few; training only needs to know about how long a pass is
        groups = self.groups if self.pad else min(self.groups, SAMPLE)
        packed = [self._pack_group(group, (), length) for group in range(groups)]
        return groups, sum(map(len, packed)), sum(map(_tokens, packed))

    def epochs(self, cursor: dict[str, Any]) -> dict[str, float]:
        """Returns how often the documents have been gone through; every group counts alike, its part by tokens."""
        group, taken = cursor["group"], tuple(map(tuple, cursor["taken"]))
        packed, done = self._left(group, taken)
        left = _tokens(packed[done:]) / _tokens(self._rows(group, (), self.sequence_length)) if taken else 1.0
        return {"all": (group + 1 - left) / self.groups}

    def take(self, cursor: dict[str, Any], count: int) -> tuple[list[Row], dict[str, Any]]:
        """Returns the parts of each row."""
        group, taken = cursor["group"], tuple(map(tuple, cursor["taken"]))
        rows: list[Row] = []
        while len(rows) < count and not (self.pad and group >= self.groups):
            packed, done = self._left(group, taken)
            history = taken[:-1] if done else taken
            left = packed[done : done + count - len(rows)]
            rows += left
            if left:
                taken = (*history, (self.sequence_length, done + len(left)))
            if done + len(left) >= len(packed):
                group, taken = group + 1, ()
        return rows, {"group": group, "taken": [list(pair) for pair in taken]}

    def _left(self, group: int, taken: Taken) -> tuple[list[Row], int]:
        """Returns a group's rows of the present length, and how many of them have been handed out."""
        if taken and taken[-1][0] == self.sequence_length:
            return self._rows(group, taken[:-1], self.sequence_length), taken[-1][1]
        return self._rows(group, taken, self.sequence_length), 0

    def read(self, rows: Sequence[Row], own: slice) -> Batch:
        """Returns the rows of a slice as a batch, as wide as all of them need."""
        chosen = [*rows[own]]
        chosen += [[]] * (self.batch_size - len(chosen))
        return to_batch(self.store, chosen, self.width(rows), mask_documents=True)

    def chunks(self, rows: Sequence[Row], own: slice) -> Iterator[Chunk]:
        """Yields the chunks of a remote folder that a slice of rows is read from."""
        return self.store.remote_chunks(chain.from_iterable(rows[own]))

    def cache_bytes(self) -> int:
        """Returns the size of the cache; 0 where nothing is remote."""
        return self.store.cache_bytes

    def _pack_group(self, group: int, history: Taken, length: int) -> list[Row]:
        """Returns the rows of a group that are left when, of earlier lengths, so many rows were handed out."""
        epoch, number = divmod(group, self.groups)
        indices = np.arange(number * GROUP, min((number + 1) * GROUP, self.documents))
        if self.shuffle:
            indices = Permutation(self.documents, (self.seed, epoch)).map(indices)
        pieces: list[Segment] = list(self.store.documents(indices))
        packed: list[Row] = []
        for turn, (longest, taken) in enumerate((*history, (length, 0))):
            pieces = [
                (first + at, min(longest, size - at))
                for first, size in pieces
                for at in range(0, size, longest)
            ]
            random = np.random.default_rng((self.seed, epoch, number, turn))
            packed = self.pack(pieces, longest, random)
            pieces = [piece for row in packed[taken:] for piece in row]
        return packed


def _tokens(rows: list[Row]) -> int:
    return sum(size for row in rows for _, size in row)
