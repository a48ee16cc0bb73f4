"""What masking needs to know of a tokenizer: its special tokens, and which pieces belong to one word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

ENDS_OF_ROWS = (("[CLS]", "[SEP]"), ("<s>", "</s>"))
"""Tokens around a row, as BERT and RoBERTa have them; the first pair of which both exist is used."""

SPACES = {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"}
"""How byte-level tokenizers and SentencePiece write white space."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Args:
        ids: Token -> id.
        special: Ids that are never masked: special tokens, and the end of a text.
        continues: Which ids may continue the word before them, (V,) bool.
        continued: Which ids may be continued, (V,) bool.
    """

    ids: Mapping[str, int]
    special: np.ndarray
    continues: np.ndarray
    continued: np.ndarray

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of the word of each token in a row, (n,), rising from 0."""
        joined = self.continues[ids[1:]] & self.continued[ids[:-1]]
        return np.concatenate([[0], np.cumsum(~joined)]) if len(ids) else np.zeros(0, np.int64)

    def row_ends(self) -> tuple[int, int] | None:
        """Returns the ids of the tokens before and behind a row; None: the tokenizer has none."""
        pair = next((pair for pair in ENDS_OF_ROWS if all(token in self.ids for token in pair)), None)
        return None if pair is None else (self.ids[pair[0]], self.ids[pair[1]])


def read_vocabulary(tokenizer_json: str, end_of_text_id: int) -> Vocabulary:
    """Returns the vocabulary of a tokenizer.

    A word is what is between spaces, and a mark of punctuation each: with the prefix of pieces within words ("##") as
    WordPiece says, else letters and digits that follow each other without a space before them.

    Args:
        tokenizer_json: As in `HasTokenizer`.
        end_of_text_id: The id that ends a text.
    """
    from tokenizers import Tokenizer

    described = json.loads(tokenizer_json)
    ids = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
    size = max(ids.values()) + 1
    special = np.zeros(size, bool)
    special[[token["id"] for token in described.get("added_tokens") or () if token["special"]]] = True
    special[end_of_text_id] = True
    prefix = described["model"].get("continuing_subword_prefix")
    continues, continued = np.zeros((2, size), bool)
    is_bytes = _has_bytes(described.get("decoder") or {})
    for token, number in ids.items():
        if prefix:
            continues[number], continued[number] = token.startswith(prefix), True
        else:
            first, last = _ends(token, is_bytes)
            continues[number], continued[number] = first, last
    return Vocabulary(ids, special, continues & ~special, continued & ~special)


def _ends(token: str, is_bytes: bool) -> tuple[bool, bool]:
    """Returns whether a token goes on with the word before it, and whether the next may go on with this one.

    A space at the end of a token is in front of the next one's word.
    """
    first, last = (SPACES.get(token[at : at + 1 or None], token[at : at + 1 or None]) for at in (0, -1))
    return _in_word(first, is_bytes), last == " " or _in_word(last, is_bytes)


def _in_word(character: str, is_bytes: bool) -> bool:
    # of other scripts a token may hold part of a character: its bytes belong to words
    return character.isalnum() or (is_bytes and _bytes().get(character, 0) >= 0x80)


@cache
def _bytes() -> dict[str, int]:
    """Returns character -> byte, as GPT-2 writes bytes."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + n): b for n, b in enumerate(others)}


def _has_bytes(decoder: Mapping[str, Any]) -> bool:
    parts = decoder.get("decoders") or [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)
