"""Trains a byte-level Unigram tokenizer on the documents of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer as Implementation
from tokenizers import decoders, models, trainers

from core.technique import technique
from datamodules.preparation.library_tokenizer import END_OF_TEXT, TrainedTokenizer, byte_alphabet

_NEVER = -1000.0  # nats per piece: any other segmentation of what spells END_OF_TEXT is more likely
_DECIMALS = 3
_STEPS = 256 * 0.0001  # nats: how far above the least likely piece the trainer puts bytes that do not occur


@technique(paper="Kudo, arXiv:1804.10959; pieces on bytes, so that nothing is unknown")
class UnigramTokenizer(TrainedTokenizer):
    """Unigram on bytes: the segmentation that is most likely if pieces are drawn one by one.

    Training begins with all that occurs often and, in turns, fits the pieces' probabilities (EM) and takes
    those out that explain least. Each byte stays a piece, so that any text is encoded, and decoded to
    exactly what it was. What spells `<|endoftext|>` in a document is encoded as ordinary text.

    The library's trainer takes candidates from the different words of the text, however often each occurs: it
    learns few runs of spaces, and needs more tokens than BPE where text is indented.

    The ids are the end-of-text id 0, then pieces, most likely first. The same documents give the same
    tokenizer: the trainer adds up its expectations in a random order, which shows in their last digits, and
    scores are kept to 0.001 nats.

    Args:
        vocab_size: Number of ids, at least 257.

    Raises:
        ConfigError: If `vocab_size` is below 257. In `prepare`: if the text is too short for as many; says
            how many it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: UnigramTokenizer, init_args: {vocab_size: 4096}}
    """

    _LEAST = 256 + 1
    _BECAUSE = f"256 bytes and {END_OF_TEXT}"

    def _trained(self, documents: Iterable[str]) -> Implementation:
        trainer = trainers.UnigramTrainer(
            vocab_size=self._wanted,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=byte_alphabet(),
            show_progress=False,
        )
        trained = self._train(models.Unigram(), trainer, documents)
        pieces = _settled(json.loads(trained.to_str())["model"]["vocab"][1:], self._wanted - 1)
        self._require_all(len(pieces) + 1)
        tokenizer = Implementation(models.Unigram([(END_OF_TEXT, _NEVER), *pieces], None, False))
        tokenizer.pre_tokenizer = trained.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer


def _settled(pieces: list[tuple[str, float]], most: int) -> list[tuple[str, float]]:
    """Returns pieces and scores without what chance had a part in: last digits and the order of rare bytes.

    Of the longer ones the likeliest are kept; if only bytes are wanted, the trainer does not stop in time.
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
