"""Trains a byte-level Unigram tokenizer on the documents of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer as Implementation
from tokenizers import decoders, models, trainers

from core.technique import technique
from datamodules.preparation.tokenizers.library_tokenizer import TrainedTokenizer

_NEVER = -1000.0  # nats: any other segmentation of the text "<|endoftext|>" is more likely
_DECIMALS = 3
_STEPS = 256 * 0.0001
"""Nats: the range above the least likely piece in which the trainer puts bytes that do not occur."""


@technique(paper="Kudo, arXiv:1804.10959; pieces on bytes, so that nothing is unknown")
class UnigramTokenizer(TrainedTokenizer):
    """Byte-level Unigram: each text is segmented into its most likely pieces under a unigram model.

    Training starts from all frequent substrings. It alternates between fitting the pieces' probabilities (EM) and
    removing the pieces that matter least. Each byte stays a piece, so that any text is encoded, and decoded to
    exactly what it was. The text `<|endoftext|>` in a document is encoded as ordinary text.

    The library's trainer takes candidates from the distinct words of the text, regardless of their counts: it
    learns few runs of spaces, and needs more tokens than BPE for indented text.

    The ids are the end-of-text id 0, then pieces, most likely first. The same documents give the same
    tokenizer: the trainer sums expectations in a random order, which changes their last digits, so scores are
    rounded to 0.001 nats.

    Args:
        vocab_size: Number of ids, at least 257.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on.

    Raises:
        ConfigError: If `vocab_size` is below 257. In `prepare`: if the text is too short for that; says
            how many ids it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: UnigramTokenizer, init_args: {vocab_size: 4096}}
    """

    def _trained(self, documents: Iterable[str]) -> Implementation:
        trainer = trainers.UnigramTrainer(**self._trainer_options())
        trained = self._train(models.Unigram(), trainer, documents)
        first = len(self._special)
        pieces = _reproducible(json.loads(trained.to_str())["model"]["vocab"][first:], self._wanted - first)
        self._require_all(len(pieces) + len(self._special))
        special = [(token, _NEVER) for token in self._special]
        tokenizer = Implementation(models.Unigram([*special, *pieces], None, False))
        tokenizer.pre_tokenizer = trained.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(self._special)
        return tokenizer


def _reproducible(pieces: list[tuple[str, float]], most: int) -> list[tuple[str, float]]:
    """Returns pieces and scores without what varies between runs: last digits and the order of rare bytes.

    Keeps the most likely of the longer pieces: with a small vocabulary the trainer stops with too many of them.
    """
    least = min(score for _, score in pieces)
    bytes_ = [
        (piece, least if score <= least + _STEPS else score) for piece, score in pieces if len(piece) == 1
    ]
    longer = sorted(((p, round(score, _DECIMALS)) for p, score in pieces if len(p) > 1), key=_likeliest_first)
    found = [(piece, round(score, _DECIMALS)) for piece, score in bytes_] + longer[: most - len(bytes_)]
    return sorted(found, key=_likeliest_first)


def _likeliest_first(pair: tuple[str, float]) -> tuple[float, str]:
    return -pair[1], pair[0]
