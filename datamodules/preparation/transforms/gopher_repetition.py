"""Gopher's repetition rules: lines, paragraphs and n-grams that occur again and again."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.technique import technique
from toolkit.document_filter import DocumentFilter, check_thresholds
from toolkit.english_words import words

TOP = {2: 0.2, 3: 0.18, 4: 0.16}
REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: no information is lost in the product


@technique(paper="Gopher, Rae et al. 2021, arXiv:2112.11446, appendix A.1.1, table A1: repetition removal")
class GopherRepetition(DocumentFilter):
    """Drops documents of which too much is said again and again.

    Words are those of :mod:`toolkit.english_words`. A rule whose threshold is None or not listed is left out. The
    decisions are those of datatrove's `GopherRepetitionFilter`, save for one: that joins the words of repeated n-grams
    without a space, so that "on going" repeats "ongo ing"; here n-grams are equal if their words are, as in the paper.

    Most documents are kept without counting n-grams: hashes of these give bounds that no count exceeds. Where a bound is
    above the threshold, the n-grams are counted.

    Args:
        max_repeated_lines: Largest share of lines that occurred before in the document; 0.3 in the paper.
        max_repeated_paragraphs: The same of paragraphs, between empty lines; 0.3 in the paper.
        max_repeated_line_characters: Largest share of characters in such lines; 0.2 in the paper.
        max_repeated_paragraph_characters: The same of paragraphs; 0.2 in the paper.
        max_top_ngram: For n words, the largest share of characters in the most frequent n-gram, spaces included;
            0.2, 0.18 and 0.16 for 2, 3 and 4 words in the paper.
        max_repeated_ngrams: For n words, the largest share of characters in n-grams that occurred before, each
            character counted once; 0.15 for 5 words to 0.1 for 10 in the paper.

    Raises:
        ConfigError: If a share is not between 0 and 1, or an n-gram has no words.

    Example:
        data:
          init_args:
            transforms:
              - class_path: GopherRepetition
                init_args: {max_repeated_lines: 0.3, max_top_ngram: {2: 0.2, 3: 0.18, 4: 0.16}}
    """

    def __init__(
        self,
        max_repeated_lines: float | None = 0.3,
        max_repeated_paragraphs: float | None = 0.3,
        max_repeated_line_characters: float | None = 0.2,
        max_repeated_paragraph_characters: float | None = 0.2,
        max_top_ngram: Mapping[int, float] = TOP,
        max_repeated_ngrams: Mapping[int, float] = REPEATED,
    ) -> None:
        self.max_repeated_lines = max_repeated_lines
        self.max_repeated_paragraphs = max_repeated_paragraphs
        self.max_repeated_line_characters = max_repeated_line_characters
        self.max_repeated_paragraph_characters = max_repeated_paragraph_characters
        self.max_top_ngram = dict(sorted(max_top_ngram.items()))
        self.max_repeated_ngrams = dict(sorted(max_repeated_ngrams.items()))
        check_thresholds(self, shares=vars(self))
        for name in ("max_top_ngram", "max_repeated_ngrams"):
            for n, share in getattr(self, name).items():
                if n < 1 or not 0 <= share <= 1:
                    raise ConfigError(
                        f"GopherRepetition: {name} has {n}: {share}. It has to be a number of words, at least 1, and a "
                        "share between 0 and 1, such as {2: 0.2}."
                    )

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options, n-grams in the order of their lengths, and the version of the Unicode tables."""
        ngrams = {name: [*getattr(self, name).items()] for name in ("max_top_ngram", "max_repeated_ngrams")}
        return {**super().fingerprint(), **ngrams, "unicode": unicodedata.unidata_version}

    def reason(self, text: str) -> str | None:
        """Returns the first rule that the document breaks."""
        return "empty" if not text else self._by_parts(text) or self._by_ngrams(text)

    def _by_parts(self, text: str) -> str | None:
        most, most_characters = self.max_repeated_paragraphs, self.max_repeated_paragraph_characters
        if broken := _repeated_parts(_PARAGRAPHS.split(text.strip()), len(text), most, most_characters):
            return f"{broken} paragraphs"
        most, most_characters = self.max_repeated_lines, self.max_repeated_line_characters
        broken = _repeated_parts(_LINES.split(text), len(text), most, most_characters)
        return f"{broken} lines" if broken else None

    def _by_ngrams(self, text: str) -> str | None:
        found = words(text)
        grams = _Hashes(found)
        for n, share in self.max_top_ngram.items():
            if grams.bound_of_top(n) / len(text) > share and _top(found, n) / len(text) > share:
                return f"most frequent {n}-gram"
        limits = self.max_repeated_ngrams
        if not limits or grams.bound_of_repeated(min(limits)) / len(text) <= min(limits.values()):
            return None  # what repeats a longer n-gram repeats the shorter ones in it
        for n, share in limits.items():
            if grams.bound_of_repeated(n) / len(text) > share and _repeated(found, n) / len(text) > share:
                return f"repeated {n}-grams"
        return None


class _Hashes:
    """Hashes of the n-grams of a document, and what their numbers cannot exceed."""

    def __init__(self, found: Sequence[str]) -> None:
        self.words = np.fromiter(map(hash, found), np.int64, len(found)).view(np.uint64)
        self.lengths = np.fromiter(map(len, found), np.int64, len(found))
        self.ends = np.concatenate([[0], np.cumsum(self.lengths)])

    def of(self, n: int) -> np.ndarray:
        """Returns a hash of each n-gram; equal n-grams have the same."""
        number = len(self.words) - n + 1
        hashes = self.words[:number].copy()
        for place in range(1, n):
            hashes *= _FACTOR
            hashes ^= hashes >> np.uint64(29)
            hashes += self.words[place : number + place]
        return hashes

    def bound_of_top(self, n: int) -> int:
        """Returns at least the characters in the most frequent n-gram."""
        if len(self.words) < n:
            return 0
        bits = int(8 * len(self.words)).bit_length()
        buckets = (self.of(n) * _FACTOR >> np.uint64(64 - bits)).astype(np.int64)
        lengths = self.ends[n:] - self.ends[:-n] + n - 1
        return int((np.bincount(buckets)[buckets] * lengths).max())

    def bound_of_repeated(self, n: int) -> int:
        """Returns at least the characters in n-grams that occurred before."""
        if len(self.words) < n:
            return 0
        hashes = self.of(n) * _FACTOR
        places = np.uint64((1 << len(hashes).bit_length()) - 1)
        # equal hashes are next to each other, in the order of their places
        keys = np.sort(hashes & ~places | np.arange(len(hashes), dtype=np.uint64))
        again = (keys[1:][keys[1:] ^ keys[:-1] <= places] & places).astype(np.int64)
        if not len(again):
            return 0
        marks = np.zeros(len(self.words) + 1, np.int64)
        np.add.at(marks, again, 1)
        np.add.at(marks, again + n, -1)
        return int(self.lengths[np.cumsum(marks[:-1]) > 0].sum())


def _repeated_parts(
    parts: Sequence[str], characters: int, most: float | None, most_characters: float | None
) -> str | None:
    unique = set(parts)
    if len(unique) == len(parts):
        return None
    if most is not None and (len(parts) - len(unique)) / len(parts) > most:
        return "repeated"
    repeated = sum(map(len, parts)) - sum(map(len, unique))
    return (
        "characters in repeated"
        if most_characters is not None and repeated / characters > most_characters
        else None
    )


def _top(found: Sequence[str], n: int) -> int:
    """Returns the characters in the most frequent n-gram; of several the one that occurs first."""
    [(ngram, times)] = Counter(zip(*(found[place:] for place in range(n)), strict=False)).most_common(1)
    return (sum(map(len, ngram)) + n - 1) * times


def _repeated(found: Sequence[str], n: int) -> int:
    """Returns the characters in n-grams that occurred before; behind such a one, the next begins."""
    ngrams = list(zip(*(found[place:] for place in range(n)), strict=False))
    seen: set[tuple[str, ...]] = set()
    characters = place = 0
    while place < len(ngrams):
        if ngrams[place] in seen:
            characters += sum(map(len, ngrams[place]))
            place += n
        else:
            seen.add(ngrams[place])
            place += 1
    return characters
