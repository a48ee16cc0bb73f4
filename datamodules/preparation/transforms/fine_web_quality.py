"""FineWeb's rules: how lines end, how long they are, how many are repeated, how many there are."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from core.technique import technique
from toolkit.document_filter import DocumentFilter, check_thresholds
from toolkit.english_words import SENTENCE_ENDS, words


@technique(paper="FineWeb, Penedo et al. 2024, arXiv:2406.17557, section 3.5")
class FineWebQuality(DocumentFilter):
    """Drops menus, lists and lines that were put together by a machine, rather than written.

    Lines are what is between newlines and not blank. A rule whose argument is None is left out. The decisions are those
    of datatrove's `FineWebQualityFilter`, the code that made FineWeb: what is at a threshold is kept, where the paper
    writes that it is dropped.

    Args:
        min_closed_lines: Least share of lines that end with a mark that ends sentences; 0.12 in the paper.
        keep_without_closed: Whether a document is kept in which no line at all ends so.
        closing: The characters that end a line so; None: those with the Unicode property Sentence_Terminal, of all scripts.
        max_short_lines: Largest share of short lines; 0.67 in the paper.
        short_line_characters: Largest length of a short line, in characters; 30 in the paper.
        max_repeated_characters: Largest share of characters in lines that occurred before, newlines not counted; 0.1 in the
            paper, 0.01 in datatrove, with which FineWeb was made.
        max_newlines_per_word: Largest number of newlines for each word of :mod:`toolkit.english_words`; 0.3 in datatrove.

    Raises:
        ConfigError: If a number is negative, or a share above 1.

    Example:
        data:
          init_args:
            transforms:
              - class_path: FineWebQuality
                init_args: {min_closed_lines: 0.12, max_short_lines: 0.67, max_repeated_characters: 0.01}
    """

    def __init__(
        self,
        min_closed_lines: float | None = 0.12,
        keep_without_closed: bool = False,
        closing: str | None = None,
        max_short_lines: float | None = 0.67,
        short_line_characters: int = 30,
        max_repeated_characters: float | None = 0.01,
        max_newlines_per_word: float | None = 0.3,
    ) -> None:
        self.min_closed_lines, self.keep_without_closed = min_closed_lines, keep_without_closed
        self.closing = closing
        self.max_short_lines, self.short_line_characters = max_short_lines, short_line_characters
        self.max_repeated_characters = max_repeated_characters
        self.max_newlines_per_word = max_newlines_per_word
        check_thresholds(self, shares=("min_closed_lines", "max_short_lines", "max_repeated_characters"))
        self._closing = SENTENCE_ENDS if closing is None else frozenset(closing)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the options and the version of the Unicode tables, on which words depend."""
        return {**super().fingerprint(), "unicode": unicodedata.unidata_version}

    def reason(self, text: str) -> str | None:
        """Returns the first rule that the document breaks."""
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return "empty"
        if self._ends_open(lines):
            return "lines without an end"
        if self.max_short_lines is not None:
            short = sum(length <= self.short_line_characters for length in map(len, lines))
            if short / len(lines) > self.max_short_lines:
                return "short lines"
        if self._repeats(text, lines):
            return "repeated lines"
        return "newlines" if self._is_list(text) else None

    def _ends_open(self, lines: Sequence[str]) -> bool:
        if self.min_closed_lines is None:
            return False
        closed = sum(line[-1] in self._closing for line in lines)
        return closed / len(lines) < self.min_closed_lines and not (self.keep_without_closed and not closed)

    def _repeats(self, text: str, lines: Sequence[str]) -> bool:
        unique = set(lines)
        if self.max_repeated_characters is None or len(unique) == len(lines):
            return False
        repeated = sum(map(len, lines)) - sum(map(len, unique))
        return repeated / (len(text) - text.count("\n")) > self.max_repeated_characters

    def _is_list(self, text: str) -> bool:
        newlines, most = text.count("\n"), self.max_newlines_per_word
        if most is None or newlines / len(text.split()) <= most:
            return False  # there are no fewer words than pieces between spaces
        return newlines / len(words(text)) > most
