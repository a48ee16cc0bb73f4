"""Which of the ranks that hold the same part of a tensor writes it: ranks with the same parts share them evenly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_SMALL = 1024
"""Elements up to which a part is written by the first of its ranks.

Of what all ranks hold, such as counts of steps, a resumed run would otherwise open the files of all of them.
"""

Numbers = NDArray[np.int64]


def writers(held: Sequence[Numbers]) -> list[Numbers]:
    """Returns the rank that writes each part, for each rank in the order of its parts.

    Args:
        held: Of each rank, a row for each part that it holds: a hash of what it is, and its number of elements.
    """
    counts = [len(own) for own in held]
    ranks = np.repeat(np.arange(len(held)), counts)
    hashes, elements = np.concatenate(held).reshape(-1, 2).T
    _, part, holders = np.unique(hashes, return_inverse=True, return_counts=True)
    order = np.argsort(part, kind="stable")  # holders of a part in a row, the first rank first
    first = np.cumsum(holders) - holders
    ranks, elements = ranks[order], elements[order][first]
    chosen = np.zeros(len(holders), np.int64)
    shared = np.flatnonzero((holders > 1) & (elements > MOST_SMALL))
    if len(shared):
        chosen[shared] = _turns(_sets(ranks, first)[shared], elements[shared], holders[shared])
    return np.split(ranks[first + chosen][part], np.cumsum(counts)[:-1])


def _sets(ranks: Numbers, first: Numbers) -> Numbers:
    """Returns a number for each part, which is the same where the same ranks hold it: a sum of random ones."""
    of_rank = np.random.default_rng(0).integers(-(2**63), 2**63, ranks.max() + 1, np.int64)
    return np.asarray(np.add.reduceat(of_rank[ranks], first))


def _turns(sets: Numbers, elements: Numbers, holders: Numbers) -> Numbers:
    """Returns which of its holders writes each part: the largest part of a set first, there and back again."""
    order = np.lexsort((-elements, sets))
    begins = np.diff(sets[order], prepend=sets[order][0] - 1) != 0
    number = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    rounds, turn = np.divmod(number, holders[order])
    result = np.empty_like(turn)
    result[order] = np.where(rounds % 2, holders[order] - 1 - turn, turn)
    return result
