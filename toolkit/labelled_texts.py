"""Texts, pairs of texts and lists of words as ids, with the positions where their labels are.

The data module for labelled texts and the command that labels texts encode alike with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

__all__ = ["LabelledTexts"]


class LabelledTexts:
    """Encodes texts as a tokenizer's post-processor says, such as with [CLS] and [SEP]; else the end-of-text token ends them.

    Args:
        tokenizer_json: The tokenizer.
        end_of_text_id: What ends a text behind which the tokenizer puts nothing.
        position: Where the label of a text is: at its `last` token or its `first`.
        separator: Between the texts of a pair, where the tokenizer has nothing there.
    """

    def __init__(self, tokenizer_json: str, end_of_text_id: int, position: str, separator: str) -> None:
        self.end, self.position, self.separator = end_of_text_id, position, separator
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._ends = not any(self.tokenizer.encode("a").special_tokens_mask[-1:])  # nothing is behind a text

    def encode(
        self, texts: Sequence[str | tuple[str, str] | Sequence[str]]
    ) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each text, and the positions of its labels: one, or of a list of words one for each.

        Where a word has no token of its own, its list has no positions.

        Args:
            texts: Each a text, a pair (a tuple) or a list of words.
        """
        given: list[Any] = [" ".join(one) if isinstance(one, list) else self._joined(one) for one in texts]
        return [
            self._placed(one, encoding)
            for one, encoding in zip(texts, self.tokenizer.encode_batch(given), strict=True)
        ]

    def _joined(self, text: Any) -> Any:
        return self.separator.join(text) if isinstance(text, tuple) and self._ends else text

    def _placed(self, text: Any, encoding: Encoding) -> tuple[list[int], list[int]]:
        ids = [*encoding.ids, *([self.end] if self._ends else [])]
        if isinstance(text, list):
            return ids, _first_tokens(text, encoding)
        return ids, [0 if self.position == "first" else len(ids) - 1] if ids else []


def _first_tokens(words: Sequence[str], encoding: Any) -> list[int]:
    """Returns the token that holds the first character of each word of a text of words with spaces between them.

    A word of which a tokenizer leaves nothing has none.
    """
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    places, found = 0, []
    for word in words:
        first = places + len(word) - len(word.lstrip())
        holding = np.flatnonzero((begins <= first) & (first < ends))
        found += holding[:1].tolist()
        places += len(word) + 1
    return found
