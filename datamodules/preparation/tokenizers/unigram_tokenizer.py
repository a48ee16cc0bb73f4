"""Trains a Unigram tokenizer on the documents of the run: on bytes, or on characters as SentencePiece does."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Implementation

from core.technique import technique
from datamodules.preparation.tokenizers.characters import counted, most_frequent
from datamodules.preparation.tokenizers.library_tokenizer import (
    END_OF_TEXT,
    LONG_RUNS,
    TrainedTokenizer,
    trained_on,
)

_NEVER = -1000.0  # nats: any other segmentation of the text "<|endoftext|>" is more likely
_DECIMALS = 3
_STEP = 0.0001
"""Nats: the trainer puts characters that do not occur so far apart, above the least likely piece."""

_UNKNOWN, _SPACE = "<unk>", "▁"
_COVERAGE = 0.9995
"""Share of the text that the characters with pieces of their own cover: SentencePiece's default."""

_ALWAYS = set(string.printable) - set(string.whitespace) | {_SPACE, "\n"}
"""Characters that have pieces in any text: then no text is spelt as the name of a byte is."""


@technique(
    paper="Kudo, arXiv:1804.10959; characters, spaces and byte fallback as in SentencePiece, arXiv:1808.06226"
)
class UnigramTokenizer(TrainedTokenizer):
    """Unigram: each text is segmented into its most likely pieces under a unigram model.

    Training starts from all frequent substrings. It alternates between fitting the pieces' probabilities (EM) and
    removing the pieces that matter least.

    With `unknown: bytes` pieces consist of bytes, each of which stays a piece, so that any text is encoded, and decoded
    to exactly what it was. The others are SentencePiece's: pieces consist of the characters that cover 99.95% of the text,
    a space is written as "▁" at the start of a word, and nothing is normalized. With `byte_fallback` another
    character becomes its UTF-8 bytes: all text but the character "▁" itself, which becomes a space, is decoded to what it
    was. With `unk` it becomes <unk> and is lost, a run of them as one.

    The library's trainer takes candidates from the distinct words of the text, regardless of their counts: it
    learns few runs of spaces, and needs more tokens than BPE for indented text.

    The text `<|endoftext|>` in a document is encoded as ordinary text. The ids are the end-of-text id 0, other special
    tokens, bytes for the fallback, then pieces, most likely first. The same documents give the same
    tokenizer: the trainer sums expectations in a random order, which changes their last digits, so scores are
    rounded to 0.001 nats.

    Args:
        vocab_size: Number of ids, at least 257; 354 with `byte_fallback`, 98 with `unk`.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on, after <unk>.
        unknown: What unknown characters become: `bytes`, where all text is bytes; `byte_fallback`; or `unk`.

    Raises:
        ConfigError: If `vocab_size` is too low. In `prepare`: if the text is too short for that; says
            how many ids it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: UnigramTokenizer, init_args: {vocab_size: 4096}}
    """

    def __init__(
        self,
        vocab_size: int = 4096,
        special_tokens: Sequence[str] = (),
        unknown: Literal["bytes", "byte_fallback", "unk"] = "bytes",
    ) -> None:
        self.unknown = unknown
        self._bytes = [f"<0x{byte:02X}>" for byte in range(256)] if unknown == "byte_fallback" else []
        if unknown != "bytes":
            self._LEAST = 1 + len(self._bytes) + len(_ALWAYS)
            self._BECAUSE = f"{END_OF_TEXT}{', 256 bytes' if self._bytes else ''} and ASCII"
            special_tokens = [_UNKNOWN, *special_tokens]
        super().__init__(vocab_size, special_tokens)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the requested number of ids, the special tokens if there are any, and `unknown` if it is not the default."""
        more = {"unknown": self.unknown} if self.unknown != "bytes" else {}
        return {**super().fingerprint(), **more}

    def _trained(self, documents: Iterable[str]) -> Implementation:
        return self._of_bytes(documents) if self.unknown == "bytes" else self._of_characters(documents)

    def _of_bytes(self, documents: Iterable[str]) -> Implementation:
        trained = self._train(models.Unigram(), trainers.UnigramTrainer(**self._trainer_options()), documents)
        tokenizer = Implementation(models.Unigram(self._pieces(trained), None, False))
        tokenizer.pre_tokenizer = trained.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(self._special)
        return tokenizer

    def _of_characters(self, documents: Iterable[str]) -> Implementation:
        """Returns a tokenizer as SentencePiece trains it; training alone leaves rare characters out."""
        words = [
            pre_tokenizers.Split(Regex(f"{LONG_RUNS}|\n+"), "isolated"),
            pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never"),
        ]
        with counted(documents) as (counts, again):
            counts[_SPACE] += counts.pop(" ", 0)
            room = self._wanted - len(self._special) - len(self._bytes) - len(_ALWAYS)
            alphabet = sorted(_ALWAYS | set(most_frequent(counts, room, _COVERAGE)))
            options = self._trainer_options() | {"initial_alphabet": alphabet}
            options["vocab_size"] -= len(self._bytes)
            trained = Implementation(models.Unigram())
            rare = Regex(f"[^{''.join(map(_in_class, alphabet))}]")
            trained.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.Split(rare, "removed")])
            trained_on(trained, again, trainers.UnigramTrainer(**options))
        tokenizer = Implementation(
            models.Unigram(self._pieces(trained), self._special.index(_UNKNOWN), bool(self._bytes))
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokenizer.add_special_tokens(self._special)
        return tokenizer

    def _pieces(self, trained: Implementation) -> list[tuple[str, float]]:
        """Returns all pieces and their scores in the order of their ids."""
        first = len(self._special)
        most = self._wanted - first - len(self._bytes)
        pieces = _reproducible(json.loads(trained.to_str())["model"]["vocab"][first:], most)
        self._require_all(first + len(self._bytes) + len(pieces))
        return [*((token, _NEVER) for token in [*self._special, *self._bytes]), *pieces]


def _in_class(character: str) -> str:
    """Returns a character as it is written within the brackets of a regular expression."""
    return f"\\x{{{ord(character):x}}}"


def _reproducible(pieces: list[tuple[str, float]], most: int) -> list[tuple[str, float]]:
    """Returns pieces and scores without what varies between runs: last digits and the order of rare characters.

    Keeps the most likely of the longer pieces: with a small vocabulary the trainer stops with too many of them.
    """
    least = min(score for _, score in pieces)
    single = [(piece, score) for piece, score in pieces if len(piece) == 1]
    steps = len(single) * _STEP
    single = [(piece, least if score <= least + steps else score) for piece, score in single]
    longer = sorted(((p, round(score, _DECIMALS)) for p, score in pieces if len(p) > 1), key=_likeliest_first)
    found = [(piece, round(score, _DECIMALS)) for piece, score in single] + longer[: most - len(single)]
    return sorted(found, key=_likeliest_first)


def _likeliest_first(pair: tuple[str, float]) -> tuple[float, str]:
    return -pair[1], pair[0]
