"""Rules for the diversity of words: how many of a text's words are different, and how evenly they occur."""

from __future__ import annotations

import re
from collections import Counter
from math import log

from core.errors import ConfigError
from core.technique import technique
from toolkit.document_filter import DocumentFilter, check_thresholds

_WORDS = re.compile(r"\w+")


@technique(
    paper="the signals rps_doc_frac_unique_words and rps_doc_unigram_entropy of RedPajama-V2, arXiv:2411.12372, here of an equal "
    "number of words; at an equal number: Johnson 1944, 'Studies in language behavior'"
)
class WordDiversity(DocumentFilter):
    """Drops documents with few different words, such as lists of the same keywords and texts made of templates.

    The longer a text, the smaller its share of different words, so it is measured on the first `words` words: runs of letters and
    digits, in lower case. A rule whose argument is None is left out.

    Args:
        min_unique: Least share of different words among them; English prose of 500 words has about 0.5.
        min_entropy: Least entropy of their distribution, in nats: of n different words that are equally frequent it is log n.
        words: How many words are looked at.

    Raises:
        ConfigError: If a number is negative, a share above 1, or `words` below 1.

    Example:
        data:
          init_args:
            transforms:
              - class_path: WordDiversity
                init_args: {min_unique: 0.2, min_entropy: null, words: 500}
    """

    def __init__(
        self, min_unique: float | None = 0.2, min_entropy: float | None = None, words: int = 500
    ) -> None:
        self.min_unique, self.min_entropy, self.words = min_unique, min_entropy, words
        check_thresholds(self, shares=("min_unique",))
        if words < 1:
            raise ConfigError(f"WordDiversity: words is {words}. It has to be at least 1.")

    def reason(self, text: str) -> str | None:
        """Returns the first rule that the text breaks."""
        found = (
            match.group().lower() for match, _ in zip(_WORDS.finditer(text), range(self.words), strict=False)
        )
        counts = Counter(found)
        total = counts.total()
        if not total:
            return "no words"
        if self.min_unique is not None and len(counts) < self.min_unique * total:
            return "few different words"
        if self.min_entropy is not None:
            entropy = log(total) - sum(count * log(count) for count in counts.values()) / total
            if entropy < self.min_entropy:
                return "few frequent words"
        return None
