"""Trains a byte-level byte-pair-encoding tokenizer on the documents of the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Implementation

from core.contracts import Tokenizer
from core.errors import ConfigError
from core.technique import technique

END_OF_TEXT = "<|endoftext|>"
_LONGEST_WORD = 256

_LEAST = 256 + 1
_SETTING = "TOKENIZERS_PARALLELISM"
_CHOSEN = os.environ.get(_SETTING)
_pool_owner = 0  # the process whose threads they are


@technique(
    paper="Sennrich et al., arXiv:1508.07909; on bytes as in GPT-2 (Radford et al., 2019, section 2.2)",
    maturity="stable",
)
class BPETokenizer(Tokenizer):
    """Byte-level BPE: any text is encoded, and decoded to exactly what it was.

    The ids are the end-of-text id 0, the 256 bytes, then merges, most frequent first. Text is cut by
    GPT-2's pattern before merging. What spells `<|endoftext|>` in a document is encoded as ordinary text.
    The same documents give the same tokenizer.

    Args:
        vocab_size: Number of ids, at least 257. Short texts may yield fewer: a pair is merged only if it
            occurs twice. The attribute `vocab_size` is what was asked for until `prepare`, then what
            there is.

    Raises:
        ConfigError: If `vocab_size` is below 257.

    Example:
        data:
          init_args:
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
    """

    def __init__(self, vocab_size: int = 4096) -> None:
        if vocab_size < _LEAST:
            raise ConfigError(
                f"BPETokenizer: vocab_size is {vocab_size}; 256 bytes and {END_OF_TEXT} take {_LEAST}, "
                "common sizes are 4096 to 131072."
            )
        self.vocab_size, self.end_of_text_id = vocab_size, 0
        self._wanted = vocab_size
        self._tokenizer = Implementation(models.BPE())

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the wanted number of ids."""
        return {"vocab_size": self._wanted}

    def prepare(self, documents: Iterable[str]) -> None:
        """Trains on the documents, on all cores; they are read once and not kept."""
        tokenizer = Implementation(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                # training is quadratic in the longest run without a space
                pre_tokenizers.Split(Regex(rf"\S{{{_LONGEST_WORD}}}"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self._wanted,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with _threads():
            tokenizer.train_from_iterator(documents, trainer)
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        with _threads():
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        """Returns the tokenizer for `tokenizers.Tokenizer.from_str`."""
        return self._tokenizer.to_str()


@contextmanager
def _threads() -> Iterator[None]:
    """Lets `tokenizers` use threads here and nowhere after, unless the user has decided.

    Its thread pool does not survive a fork. Left to itself the library warns in every data worker that is
    forked later, and a child that uses the pool of its parent hangs.
    """
    global _pool_owner
    if _CHOSEN is not None:
        yield
        return
    _pool_owner = _pool_owner or os.getpid()
    os.environ[_SETTING] = "true" if _pool_owner == os.getpid() else "false"
    try:
        yield
    finally:
        os.environ[_SETTING] = "false"
