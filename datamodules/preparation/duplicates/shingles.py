"""Texts as sets of hashed word n-grams, and the MinHash signatures of these sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.errors import ConfigError

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana and ideographs. Each character is a word."""

_WORD, _ASCII_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+"), re.compile(r"\w+", re.ASCII)

_GAP = re.compile(r"\s")
_PART = 1 << 20
"""Characters of a text, about, whose words are hashed at a time."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class ShingleSets(NamedTuple):
    """Sets of shingles, one behind the other.

    Attributes:
        values: uint64; those of each set ascending and different.
        ends: Where each set ends in `values`; with a 0 in front.
    """

    values: np.ndarray
    ends: np.ndarray


def words(text: str) -> list[str]:
    """Returns the words of a text, lower-cased, without punctuation."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())


def shingle_sets(texts: Iterable[str], length: int) -> ShingleSets:
    """Returns the set of the hashed n-grams of `length` words of each text.

    A text of fewer words is one n-gram; a text without words has none.
    """
    sets = [_shingles(_word_hashes(text), length) for text in texts]
    ends = np.zeros(len(sets) + 1, np.int64)
    np.cumsum([len(one) for one in sets], out=ends[1:])
    return ShingleSets(np.concatenate([*sets, np.empty(0, np.uint64)]), ends)


def _word_hashes(text: str) -> np.ndarray:
    """Returns a hash of each word, uint64. Words as Python's strings are of one part of the text at a time."""
    hashed, found, begin = min_hash().hash_token_sets, [np.empty(0, np.uint64)], 0
    while begin < len(text):
        gap = _GAP.search(text, begin + _PART) if len(text) - begin > _PART else None
        end = gap.start() if gap else len(text)
        found.append(np.array(hashed([words(text[begin:end])])[0], np.uint64))
        begin = end
    return found[1] if len(found) == 2 else np.concatenate(found)


def _shingles(hashes: np.ndarray, length: int) -> np.ndarray:
    if not len(hashes):
        return hashes
    if len(hashes) < length:
        hashes = np.pad(hashes, (0, length - len(hashes)))
    number = len(hashes) - length + 1
    return np.unique(mixed([hashes[offset : offset + number] for offset in range(length)]))


def band_keys(sets: ShingleSets, bands: int, rows: int, seed: int) -> np.ndarray:
    """Returns, for each set, a hash of the MinHash values of each band: uint64, (number of sets, bands)."""
    matrix = min_hash().digest_matrix_from_flat_token_hashes(
        sets.values, sets.ends.astype(np.uint64), bands * rows, seed
    )
    signatures = np.array(matrix.to_rows(), np.uint64).reshape(-1, bands, rows)
    number = np.broadcast_to(np.arange(bands, dtype=np.uint64), signatures.shape[:2])
    return mixed([number, *np.moveaxis(signatures, 2, 0)])


def mixed(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a hash of the values at each place of several uint64 arrays of one shape."""
    found = np.zeros(columns[0].shape, np.uint64)
    for column in columns:
        found ^= column
        found *= _MULTIPLIER
        found ^= found >> _SHIFT
    found *= _MULTIPLIER
    found ^= found >> np.uint64(32)
    return found


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the size of the intersection over that of the union of two sets: sorted, different values."""
    both = np.concatenate([one, other])
    both.sort(kind="stable")  # merges the two
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared)


def min_hash() -> Any:
    """Returns rensa's class of MinHash signatures.

    Raises:
        ConfigError: If rensa is not installed.
    """
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise ConfigError("NearDuplicates: rensa is not installed: pip install 'leyden[dedup]'") from error
    return RMinHash
