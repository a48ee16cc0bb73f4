"""Keys and values of the tokens so far, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One layer's keys and values, (B, heads, max_length, D), D of each its own; the first `length` tokens are filled.

    Allocated by the first `append`: only then the data type (autocast) and the number of heads on this rank (tensor
    parallelism) are known.
    """

    def __init__(self, batch_size: int, max_length: int):
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values (B, heads, T, D); returns views of all tokens so far (B, heads, length, D)."""
        if self.length == 0:
            shape = (self.batch_size, key.shape[1], self.max_length)
            self.keys, self.values = (x.new_empty(*shape, x.shape[3]) for x in (key, value))
        start, self.length = self.length, self.length + key.shape[2]
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, (b,) indexes; one may come several times."""
        self.batch_size = len(rows)
        if self.length:
            self.keys, self.values = (selected(x, rows, self.length) for x in (self.keys, self.values))

    def keep(self, length: int, max_length: int) -> bool:
        """Keeps the first `length` tokens, at least 1, with room for `max_length`; True."""
        self.length, self.max_length = length, max_length
        self.keys, self.values = (_with_room(x, length, max_length) for x in (self.keys, self.values))
        return True


class SlidingKVCache:
    """The cache of a layer whose tokens see the last `window` tokens alone.

    `length` counts all tokens so far, as in :class:`KVCache`. The buffer has room for two windows: when it is full,
    the last window moves to its front, which costs a copy once in `window` tokens.
    """

    _keys: Tensor
    _values: Tensor

    def __init__(self, max_length: int, window: int):
        self.max_length, self.window, self.length = max_length, window, 0
        self._end = 0

    @property
    def keys(self) -> Tensor:
        """Those that the next token sees, (B, heads, at most `window` - 1, D)."""
        return self._keys[:, :, self._end - self._kept : self._end]

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._values[:, :, self._end - self._kept : self._end]

    @property
    def _kept(self) -> int:
        return min(self.window - 1, self.length)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values behind those of up to `window` - 1 tokens before them, which they see."""
        if self.length == 0:
            shape = (*key.shape[:2], min(self.max_length, 2 * self.window), key.shape[3])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        kept, new = self._kept, key.shape[2]
        if self._end + new <= self._keys.shape[2]:
            start, self._end = self._end, self._end + new
            self.length += new
            self._keys[:, :, start : self._end] = key
            self._values[:, :, start : self._end] = value
            seen = slice(start - kept, self._end)
            return self._keys[:, :, seen], self._values[:, :, seen]
        key, value = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
        self.length += new
        self._end = self._kept
        self._keys[:, :, : self._end] = key[:, :, key.shape[2] - self._end :]
        self._values[:, :, : self._end] = value[:, :, value.shape[2] - self._end :]
        return key, value

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, (b,) indexes; one may come several times."""
        if self.length:
            self._keys, self._values = (selected(x, rows, self._end) for x in (self._keys, self._values))

    def keep(self, length: int, max_length: int) -> bool:
        """As :meth:`KVCache.keep`; False if tokens that the next one sees are no longer there."""
        end = self._end - (self.length - length)
        if end < min(self.window - 1, length):
            return False
        self._end, self.length, self.max_length = end, length, max_length
        room = min(max_length, 2 * self.window)
        self._keys, self._values = (_with_room(x, end, room) for x in (self._keys, self._values))
        return True


def _with_room(buffer: Tensor, length: int, max_length: int) -> Tensor:
    """Returns a buffer (B, heads, at least `max_length`, D) with the first `length` tokens of another."""
    if buffer.shape[2] >= max_length:
        return buffer
    larger = buffer.new_empty((*buffer.shape[:2], max_length, buffer.shape[3]))
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


def selected(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    """Returns a buffer (b, heads, max_length, D) with the first `length` tokens of these rows of a buffer."""
    found = buffer[:, :, :length].index_select(0, rows)
    if len(rows) != buffer.shape[0]:
        buffer = buffer.new_empty((len(rows), *buffer.shape[1:]))
    buffer[:, :, :length] = found
    return buffer
