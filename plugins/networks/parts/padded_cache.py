"""The cache of rows that begin with padding: prompts of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.networks.parts.attention import Cache


class PaddedCache(list[Cache]):
    """The caches of all layers, and where each row begins.

    Args:
        layers: Empty caches.
        padding: How many ids in front of each row are padding, (B,).
    """

    def __init__(self, layers: Sequence[Cache], padding: Tensor):
        super().__init__(layers)
        self.padding = padding
        self.visible = _visible(padding, self[0].max_length)

    def positions(self, start: int, end: int) -> Tensor:
        """Returns positions (B, T) of the tokens [start, end); those of padding are 0."""
        positions = torch.arange(start, end, device=self.padding.device)
        return (positions - self.padding[:, None]).clamp(min=0)

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, (b,) indexes; one may come several times."""
        for layer in self:
            layer.select(rows)
        self.padding = self.padding[rows]
        self.visible = _visible(self.padding, self[0].max_length)

    def keep(self, length: int, max_length: int) -> bool:
        """Keeps the first `length` tokens of one row without padding, with room for `max_length`; False: it cannot."""
        return self.visible is None and all(layer.keep(length, max_length) for layer in self)


def _visible(padding: Tensor, length: int) -> Tensor | None:
    """Returns which of all tokens are none of padding, (B, length); None: all of them."""
    if not padding.any():
        return None
    return torch.arange(length, device=padding.device) >= padding[:, None]
