"""Drops documents that have many words of the user's lists."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import ConfigError
from core.technique import technique
from toolkit.document_filter import DocumentFilter
from toolkit.word_lists import WordLists, comparable_words


@technique(
    paper="C4, arXiv:1910.10683, section 2.2: pages with a word of a list are removed; whole words by Unicode's "
    "caseless matching, Unicode Standard, section 3.13"
)
class HarmfulContent(DocumentFilter):
    """Drops documents that have many words or phrases of lists.

    A list is a text file in UTF-8 with a word or phrase on each line; lines that begin with # are comments. Whole words are
    compared, without regard to case and compatibility forms (full width, ligatures); marks of Indic and other scripts
    belong to their word, and each character of a script without spaces is a word. A phrase is found with any spaces
    and punctuation between its words. Of matches that overlap the first counts, of those that begin together the
    longest; a phrase counts as many words as it has. The time is linear in the text's length.

    A document is dropped if both limits are reached; two of these transforms drop what reaches either.

    Args:
        files: The lists.
        min_count: Least number of words in matches for which a document is dropped.
        max_share: Largest share of words in matches that is kept, 0 to 1.

    Raises:
        ConfigError: If a list cannot be read or has no words, or a number is out of range.

    Example:
        data:
          init_args:
            transforms:
              - class_path: HarmfulContent
                init_args: {files: [words.txt], min_count: 3, max_share: 0.005}
    """

    def __init__(self, files: Sequence[str], min_count: int = 3, max_share: float = 0.005) -> None:
        if min_count < 1:
            raise ConfigError(f"HarmfulContent.min_count is {min_count}; it is at least 1.")
        if not 0 <= max_share <= 1:
            raise ConfigError(f"HarmfulContent.max_share is {max_share}; it is between 0 and 1.")
        self.min_count, self.max_share = min_count, max_share
        self._words = WordLists(files, "HarmfulContent.files")

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the limits, a digest of the words, and the version of the Unicode tables."""
        lists = {"words": self._words.digest(), "unicode": unicodedata.unidata_version}
        return {**super().fingerprint(), **lists}

    def reason(self, text: str) -> str | None:
        """Returns "harmful words" or None."""
        words = comparable_words(text)
        count = self._words.count(words)
        return "harmful words" if count >= self.min_count and count > self.max_share * len(words) else None
