"""Hashes of all windows of bytes, and a few of them that any two places with the same bytes have in common."""

from __future__ import annotations

import numpy as np

from datamodules.preparation.duplicates.shingles import mixed

WORD = 8
"""Bytes of the shortest window: its hash is the number that they are."""

_BLOCK = 1 << 14
"""Windows that are hashed at a time: what is computed on the way stays in the processor's cache."""

_PLACE = np.uint64((1 << 20) - 1)
_OTHER = np.uint64(0xD1B54A32D192ED03)


def window_hashes(text: np.ndarray, length: int, second: bool = False) -> np.ndarray:
    """Returns a hash of the `length` bytes from each byte on: uint64, (len(text) - length + 1,).

    Args:
        text: uint8, contiguous.
        length: Bytes of a window, at least `WORD`.
        second: Whether it is another, independent hash.
    """
    number = max(len(text) - length + 1, 0)
    found = np.empty(number, np.uint64)
    for begin in range(0, number, _BLOCK):
        end = min(begin + _BLOCK, number)
        found[begin:end] = _hashed(text[begin : end + length - 1], length, second)
    return found


def _hashed(text: np.ndarray, length: int, second: bool) -> np.ndarray:
    """Returns hashes of windows: each is that of its first and its last bytes, which may overlap."""
    found = np.ndarray(len(text) - WORD + 1, "<u8", text, strides=(1,)).astype(np.uint64)
    if second:
        found ^= _OTHER
    size = WORD
    while size < length:
        step = min(size, length - size)
        found = mixed([found[:-step], found[step:]])
        size += step
    return found


def window_starts(ends: np.ndarray, length: int) -> np.ndarray:
    """Returns for each byte whether a window that begins there ends in the same document.

    Args:
        ends: Where each document ends in the text; none is shorter than `length`.
        length: Bytes of a window.
    """
    change = np.zeros(int(ends[-1]) + 1, np.int8)
    change[np.concatenate([[0], ends[:-1]])] = 1
    change[ends - length + 1] = -1
    return np.cumsum(change, dtype=np.int8)[:-1].astype(np.bool_)


def fingerprints(text: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns some windows of half the length: their hashes, and where they begin, ascending.

    Of the ones in `length` bytes it is the one with the least hash, the last of equal ones (winnowing: Schleimer et al.
    2003). So two places with the same `length` bytes have at least one in common. About every 51st byte begins one for a length of 200.

    Args:
        text: uint8, contiguous; documents one behind the other.
        ends: Where each ends; none is shorter than `length`.
        length: In bytes, at least twice `WORD`.
    """
    half, inside = length // 2, window_starts(ends, length)
    places = [np.empty(0, np.int64)]
    hashes = [np.empty(0, np.uint64)]
    number, width = len(text) - length + 1, length - half + 1
    for begin in range(0, number, _BLOCK):
        size = min(_BLOCK, number - begin)
        found = _hashed(text[begin : begin + size + length - 1], half, False)
        least = _least(found & ~_PLACE | (_PLACE - np.arange(len(found), dtype=np.uint64)), width)
        chosen = (_PLACE - (least[inside[begin : begin + size]] & _PLACE)).astype(np.int64)
        chosen = chosen[np.flatnonzero(np.diff(chosen, prepend=-1))]  # they never go back
        if len(chosen) and len(places[-1]) and begin + chosen[0] == places[-1][-1]:
            chosen = chosen[1:]
        if len(chosen):
            places.append(begin + chosen)
            hashes.append(mixed([found[chosen]]))  # the least of many are all small
    return np.concatenate(hashes), np.concatenate(places)


def _least(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the minimum of each `width` values in a row."""
    size = 1
    while size < width:
        step = min(size, width - size)
        values = np.minimum(values[:-step], values[step:])
        size += step
    return values
