"""Gopher's quality rules: lengths, symbols, bullets, ellipses, letters and stop words."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.technique import technique
from toolkit.document_filter import DocumentFilter, check_thresholds
from toolkit.english_words import MOST_REMEMBERED, SENTENCE_ENDS, words, words_of

PUNCTUATION = SENTENCE_ENDS.union(
    string.punctuation,
    map(chr, [*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0)]),
    "«»´–—’“”„…∶━►、。〈〉《》「」【】％（），１：；～",
)
"""A word of these alone is no word: CCNet's list, and what ends a sentence."""

BITS = 32
MASK = (1 << BITS) - 1


@technique(paper="Gopher, Rae et al. 2021, arXiv:2112.11446, appendix A.1.1: quality filtering")
class GopherQuality(DocumentFilter):
    """Drops documents of too few or odd words, of symbols, lists and cut-off lines, or without English stop words.

    Words are those of :mod:`toolkit.english_words`, where punctuation is a word of its own. Lengths count words
    that have more than punctuation; shares are of all words. A rule whose argument is None is left out. The decisions
    are those of datatrove's `GopherQualityFilter`; in a document without words, where that divides by 0, shares are 0.

    Args:
        min_words: Least number of words; 50 in the paper.
        max_words: Largest number of words; 100,000 in the paper.
        min_mean_word_length: Least mean length of words, in characters; 3 in the paper.
        max_mean_word_length: Largest mean length of words, in characters; 10 in the paper.
        max_symbol_ratio: Largest number of `#`, and of ellipses, for each word; 0.1 in the paper.
        max_bullet_lines: Largest share of lines that begin with a bullet or hyphen; 0.9 in the paper.
        max_ellipsis_lines: Largest share of lines that end with an ellipsis; 0.3 in the paper.
        min_alphabetic_words: Least share of words that have a letter; 0.8 in the paper.
        min_stop_words: Least number of different stop words; 2 in the paper.
        stop_words: The stop words, in lower case; the paper's eight.

    Raises:
        ConfigError: If a number is negative, or a share above 1.

    Example:
        data:
          init_args:
            transforms:
              - class_path: GopherQuality
                init_args: {min_words: 50, max_words: 100000, min_stop_words: 2}
    """

    def __init__(
        self,
        min_words: int | None = 50,
        max_words: int | None = 100_000,
        min_mean_word_length: float | None = 3,
        max_mean_word_length: float | None = 10,
        max_symbol_ratio: float | None = 0.1,
        max_bullet_lines: float | None = 0.9,
        max_ellipsis_lines: float | None = 0.3,
        min_alphabetic_words: float | None = 0.8,
        min_stop_words: int | None = 2,
        stop_words: Sequence[str] = ("the", "be", "to", "of", "and", "that", "have", "with"),
    ) -> None:
        self.min_words, self.max_words = min_words, max_words
        self.min_mean_word_length, self.max_mean_word_length = min_mean_word_length, max_mean_word_length
        self.max_symbol_ratio = max_symbol_ratio
        self.max_bullet_lines, self.max_ellipsis_lines = max_bullet_lines, max_ellipsis_lines
        self.min_alphabetic_words, self.min_stop_words = min_alphabetic_words, min_stop_words
        self.stop_words = sorted(stop_words)
        check_thresholds(self, shares=("max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words"))
        self._stop_words = frozenset(stop_words)
        self._figures = _Figures()

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the Unicode tables, which say what a letter is."""
        return {**super().fingerprint(), "unicode": unicodedata.unidata_version}

    def reason(self, text: str) -> str | None:
        """Returns the first rule that the document breaks."""
        pieces = text.split()
        number, proper, characters, alphabetic = _unpacked(sum(map(self._figures.__getitem__, pieces)))
        return (
            self._by_length(proper, characters)
            or self._by_symbols(text, number)
            or self._by_lines(text)
            or ("letters" if _below(alphabetic / max(number, 1), self.min_alphabetic_words) else None)
            or self._by_stop_words(text, pieces)
        )

    def _by_length(self, proper: int, characters: int) -> str | None:
        mean = characters / proper if proper else None
        rules = {
            "too short": _below(proper, self.min_words),
            "too long": _above(proper, self.max_words),
            "short words": mean is not None and _below(mean, self.min_mean_word_length),
            "long words": mean is not None and _above(mean, self.max_mean_word_length),
        }
        return next((reason for reason, broken in rules.items() if broken), None)

    def _by_symbols(self, text: str, number: int) -> str | None:
        number = max(number, 1)
        if _above(text.count("#") / number, self.max_symbol_ratio):
            return "number signs"
        ellipses = text.count("...") + text.count("…")
        return "ellipses" if _above(ellipses / number, self.max_symbol_ratio) else None

    def _by_lines(self, text: str) -> str | None:
        if "•" in text or "-" in text:
            lines = text.splitlines()
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if _above(bullets / max(len(lines), 1), self.max_bullet_lines):
                return "bullets"
        if "..." in text or "…" in text:
            lines = text.splitlines()
            cut = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if _above(cut / max(len(lines), 1), self.max_ellipsis_lines):
                return "lines that end with an ellipsis"
        return None

    def _by_stop_words(self, text: str, pieces: Iterable[str]) -> str | None:
        least = self.min_stop_words
        if not least or len(self._stop_words.intersection(pieces)) >= least:
            return None  # most texts: no need to look within pieces
        return "stop words" if len(self._stop_words.intersection(words(text))) < least else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_figures": _Figures()}


class _Figures(dict[str, int]):
    """Of a piece between spaces: its words, those that are more than punctuation, their characters, those with a letter.

    They are packed into one integer, so that `sum` adds them up for a document.
    """

    def __missing__(self, piece: str) -> int:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        found = words_of(piece)
        number = proper = alphabetic = len(found)
        characters = len(piece)
        if not piece.isalpha():
            lengths = [len(word) for word in found if not PUNCTUATION.issuperset(word)]
            proper, characters = len(lengths), sum(lengths)
            alphabetic = sum([word.isalpha() or any(map(str.isalpha, word)) for word in found])
        packed = number | proper << BITS | characters << 2 * BITS | alphabetic << 3 * BITS
        if len(piece) < 64:
            self[piece] = packed
        return packed


def _unpacked(packed: int) -> tuple[int, ...]:
    return tuple(packed >> BITS * place & MASK for place in range(4))


def _below(value: float, least: float | None) -> bool:
    return least is not None and value < least


def _above(value: float, most: float | None) -> bool:
    return most is not None and value > most
