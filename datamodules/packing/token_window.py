"""Tokens in memory, as far as rows are made of them as of stored ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class TokenWindow:
    """What rows need of a :class:`datamodules.packing.token_store.TokenStore`, of tokens in memory.

    Args:
        ids: The tokens.
        starts: Positions at which documents begin, ascending.
        ends: Whether a document ends with the last token, as the last one of a store does.
    """

    cache_bytes = 0

    def __init__(self, ids: np.ndarray, starts: np.ndarray, ends: bool = False) -> None:
        self.ids = ids
        self.starts = np.append(starts, len(ids)) if ends else starts

    def __len__(self) -> int:
        return len(self.ids)

    def copy(self, first: int, inputs: np.ndarray, labels: np.ndarray) -> bool:
        """Copies len(inputs) tokens from `first` on, and the one after each; -1 past the end.

        Returns:
            Whether all of them exist.
        """
        tokens = self.ids[first : first + len(inputs) + 1]
        missing = len(inputs) + 1 - len(tokens)
        tokens = np.pad(tokens, (0, missing), constant_values=-1)
        inputs[:], labels[:] = tokens[:-1], tokens[1:]
        return missing == 0

    def starts_between(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions in [start, stop) at which documents begin, int64; the end of the last one counts as one."""
        low, high = np.searchsorted(self.starts, (start, stop))
        return self.starts[low:high]

    def remote_chunks(self, segments: Iterable[tuple[int, int]]) -> Iterator[tuple[object, int]]:
        """Yields nothing: the tokens are in memory."""
        return iter(())
