"""Word n-grams of texts as numbers of buckets, the features of a linear classifier, without a dictionary of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import ConfigError

__all__ = ["MOST_BUCKETS", "MOST_CHARACTERS", "MOST_WORDS", "HashedNGrams"]

MOST_BUCKETS = 1 << 25
"""Limit of buckets: 128 MiB of weights."""

MOST_CHARACTERS = 1 << 20
"""Limit of the characters of a document that are looked at: some 30 MB while they are hashed."""

MOST_WORDS = 8
"""Limit of the words of an n-gram."""

_WORD_BYTES = 64
"""A longer word is told from others by so many bytes at its beginning."""

_SPACE, _LETTER, _ALONE, _REST = range(4)


def _kinds() -> np.ndarray:
    """Returns the kind of each byte of UTF-8."""
    kinds = np.full(256, _ALONE, np.uint8)
    kinds[: ord(" ") + 1] = kinds[0x7F] = _SPACE
    for letters in (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        kinds[list(letters)] = _LETTER
    kinds[0x80:0xC0] = _REST  # of a character of several bytes
    kinds[0xC0:] = _LETTER
    kinds[0xC2] = _ALONE  # to U+00BF: punctuation
    kinds[0xE2:0xEA] = _ALONE  # U+2000 to U+9FFF: punctuation, symbols, kana, Han
    kinds[0xF0:] = _ALONE  # from U+10000: emoji, rare Han
    return kinds


def _powers() -> np.ndarray:
    """Returns the factor of each byte of a word; 0 behind the last that counts."""
    found = np.zeros(_WORD_BYTES + 1, np.uint64)
    value = 1
    for place in range(_WORD_BYTES):
        found[place] = value
        value = value * 0x2545F4914F6CDD1D % (1 << 64)
    return found


_KIND, _POWER = _kinds(), _powers()
_VALUE = np.where(_KIND == _SPACE, 0, np.arange(256) + 1).astype(np.uint64)
_STEP, _SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class HashedNGrams:
    """Turns texts into the numbers of the buckets of their word n-grams; the same on every machine.

    A word is a run of letters and digits, in lower case. A word of its own is each ASCII character that is neither, nor a
    space, and each character of the ranges U+0080 to U+00BF, U+2000 to U+9FFF (punctuation, kana, Han) and from U+10000.
    Of other scripts without spaces, such as Thai, a run is one word. Two n-grams may share a bucket.

    Args:
        sizes: Words of the n-grams, such as (1, 2).
        buckets: Number of buckets, a power of two from 1,024 to `MOST_BUCKETS`.
        characters: How many characters at the beginning of a text are looked at, at most `MOST_CHARACTERS`.

    Raises:
        ConfigError: If one is out of range.
    """

    sizes: Sequence[int] = (1, 2)
    buckets: int = 1 << 20
    characters: int = 50_000

    def __post_init__(self) -> None:
        sizes = list(self.sizes)
        if not sizes or sizes != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= MOST_WORDS:
            raise ConfigError(
                f"n-gram sizes are {sizes}; they are 1 to {MOST_WORDS} words, rising, as in 1 2."
            )
        if not 1 << 10 <= self.buckets <= MOST_BUCKETS or self.buckets & (self.buckets - 1):
            raise ConfigError(
                f"buckets are {self.buckets}; they are a power of two, 1,024 to {MOST_BUCKETS:,}, such as 1048576."
            )
        if not 1 <= self.characters <= MOST_CHARACTERS:
            raise ConfigError(f"characters are {self.characters}; they are 1 to {MOST_CHARACTERS:,}.")

    def of(self, text: str) -> np.ndarray:
        """Returns the bucket of each n-gram of a text, int64, with repetitions: all of the first size, then the next."""
        words = _hashes(text[: self.characters])
        shift = np.uint64(65 - self.buckets.bit_length())
        found, longest = [], words
        for size in range(1, self.sizes[-1] + 1):
            if size > 1:
                longest = _mixed(longest[:-1] * _STEP + words[size - 1 :])
            if size in self.sizes:
                found.append((longest >> shift).astype(np.int64))
            if len(longest) < 2:
                break
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def row(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the buckets of a text, rising, and how often each occurs, float64, divided to a vector of length 1."""
        columns, counts = np.unique(self.of(text), return_counts=True)
        return columns, counts / np.sqrt(np.square(counts, dtype=np.float64).sum()) if len(counts) else counts


def _hashes(text: str) -> np.ndarray:
    """Returns a number for each word, uint64: a polynomial of its bytes modulo 2^64, mixed."""
    data = np.frombuffer(text.lower().encode("utf-8", "surrogatepass"), np.uint8)
    characters = None if text.isascii() else np.flatnonzero(_KIND[data] != _REST)
    kinds = _KIND[data if characters is None else data[characters]]
    begins = kinds != _SPACE
    begins[1:] &= (kinds[1:] == _ALONE) | (kinds[:-1] != _LETTER)
    starts = np.flatnonzero(begins)
    starts = starts if characters is None else characters[starts]
    if not len(starts):
        return np.zeros(0, np.uint64)
    data = data[starts[0] :]
    starts -= starts[0]
    place = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    np.minimum(place, _WORD_BYTES, out=place)
    return _mixed(np.add.reduceat(_VALUE[data] * _POWER[place], starts))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns numbers whose upper bits depend on all bits."""
    values = (values ^ (values >> np.uint64(31))) * _SPREAD
    return (values ^ (values >> np.uint64(29))) * _STEP
