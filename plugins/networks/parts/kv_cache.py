"""Keys and values of the tokens so far, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One layer's keys and values, (B, heads, max_length, D) each; the first `length` tokens are filled.

    Allocated by the first `append`: only then the data type (autocast) and the number of heads on this rank (tensor
    parallelism) are known.
    """

    def __init__(self, batch_size: int, max_length: int):
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values (B, heads, T, D); returns views of all tokens so far (B, heads, length, D)."""
        if self.length == 0:
            shape = (self.batch_size, key.shape[1], self.max_length, key.shape[3])
            self.keys, self.values = key.new_empty(shape), value.new_empty(shape)
        start, self.length = self.length, self.length + key.shape[2]
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class SlidingKVCache:
    """The cache of a layer whose tokens see the last `window` tokens alone: it keeps no more than those.

    `length` counts all tokens so far, as in :class:`KVCache`; `keys` and `values` hold the last of them.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, max_length: int, window: int):
        self.max_length, self.window, self.length = max_length, window, 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values behind those of up to `window` - 1 tokens before them, which they see."""
        if self.length:
            key, value = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
            self.length -= self.keys.shape[2]
        self.length += key.shape[2]
        kept = min(self.window - 1, key.shape[2])
        # copies: a view would keep a long prompt in memory
        self.keys, self.values = (x[:, :, x.shape[2] - kept :].clone() for x in (key, value))
        return key, value
