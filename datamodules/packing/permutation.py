"""A seeded permutation of any size, computed on demand: nothing is stored."""

from __future__ import annotations

import numpy as np

ROUNDS = 6
WINDOW = 4096
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """Maps 0 ... size-1 onto themselves, in an order drawn from the key.

    A Feistel network of 6 rounds over the next even number of bits; an index that falls outside the range is mapped
    again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    Up to 4096 items are shuffled in memory, because so few bits are mixed unevenly.

    Args:
        size: Number of items; at least 1.
        key: Any integers, such as (seed, epoch).
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._table = np.random.default_rng(key).permutation(size) if size <= WINDOW else None
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
        self._first, self._window = -1, np.empty(0, np.int64)

    def __call__(self, index: int) -> int:
        """Returns the image of one index; also computes and keeps those of the next 4095."""
        if not 0 <= index - self._first < len(self._window):
            self._first = index
            self._window = self.map(np.arange(index, min(index + WINDOW, self.size)))
        return int(self._window[index - self._first])

    def map(self, indices: np.ndarray) -> np.ndarray:
        """Returns the image of each index, int64 of the same shape."""
        if self._table is not None:
            return self._table[indices]
        result = self._encrypt(indices.astype(np.uint64))
        while (outside := result >= self.size).any():
            result[outside] = self._encrypt(result[outside])
        return result.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right ^ key) & self._mask)
        return (left << self._half) | right


def _hash(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64; multiplication wraps around."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
