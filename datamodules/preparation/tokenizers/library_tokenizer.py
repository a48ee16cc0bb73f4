"""Base classes of the tokenizers that run on the `tokenizers` library, trained or loaded."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Implementation

from core.contracts import Tokenizer
from core.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
LONG_RUNS = r"\S{256}|\s{256}"
"""Runs without a space, or of spaces, are cut after 256 characters: training is quadratic in the longest one."""

_SETTING = "TOKENIZERS_PARALLELISM"
_CHOSEN = os.environ.get(_SETTING)
_pool_owner = 0  # id of the process that started the thread pool


class LibraryTokenizer(Tokenizer):
    """Encodes and decodes with the library.

    Attributes:
        special_tokens_in_text: Whether the spelling of a special token in a document becomes that token; else it is
            ordinary text.
    """

    special_tokens_in_text = False
    _tokenizer: Implementation

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        with threads():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        """Returns the tokenizer for `tokenizers.Tokenizer.from_str`."""
        return self._tokenizer.to_str()


class TrainedTokenizer(LibraryTokenizer):
    """A tokenizer that is trained on the documents of the run, on their UTF-8 bytes.

    Args:
        vocab_size: Number of ids. The attribute `vocab_size` is the requested number until `prepare`, then the
            actual one.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on.
    """

    _LEAST: int = 256 + 1
    _BECAUSE: str = f"256 bytes and {END_OF_TEXT}"  # what takes the least number of ids

    def __init__(self, vocab_size: int = 4096, special_tokens: Sequence[str] = ()) -> None:
        self._special = [END_OF_TEXT, *special_tokens]
        least = self._LEAST + len(special_tokens)
        if len(set(self._special)) <= len(special_tokens) or not all(special_tokens):
            raise ConfigError(f"{type(self).__name__}: special_tokens has one twice, or an empty one.")
        if vocab_size < least:
            more = f" and {len(special_tokens)} special tokens" if special_tokens else ""
            raise ConfigError(
                f"{type(self).__name__}: vocab_size is {vocab_size}; {self._BECAUSE}{more} take {least}, "
                "common sizes are 4096 to 131072."
            )
        self.vocab_size, self.end_of_text_id = vocab_size, 0
        self._wanted = vocab_size
        self._tokenizer = Implementation(models.BPE())

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the requested number of ids, and the special tokens if there are any."""
        more = {"special_tokens": self._special[1:]} if self._special[1:] else {}
        return {"vocab_size": self._wanted, **more}

    def prepare(self, documents: Iterable[str]) -> None:
        """Trains on the documents, on all cores; they are read once and not kept."""
        tokenizer = self._trained(documents)
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    @abstractmethod
    def _trained(self, documents: Iterable[str]) -> Implementation:
        """Returns a tokenizer whose id 0 is the end of a text."""

    def _trainer_options(self) -> dict[str, Any]:
        """Returns the options that the trainers of all algorithms take."""
        return {
            "vocab_size": self._wanted,
            "special_tokens": self._special,
            "initial_alphabet": byte_alphabet(),
            "show_progress": False,
        }

    def _train(
        self, model: models.Model, trainer: Any, documents: Iterable[str], *cuts: pre_tokenizers.PreTokenizer
    ) -> Implementation:
        """Trains a model on the bytes of words as GPT-2's pattern splits them; `cuts` split these further."""
        tokenizer = Implementation(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LONG_RUNS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                *cuts,
            ]
        )
        return trained_on(tokenizer, documents, trainer)

    def _require_all(self, found: int) -> None:
        """Raises a ConfigError if the text did not yield the requested number of ids."""
        if found != self._wanted:
            raise ConfigError(
                f"{type(self).__name__}: vocab_size is {self._wanted:,}, but the training text allows {found:,} "
                f"only:\nnothing more occurs in it often enough. Set vocab_size to {found} or less, or add text."
            )


def trained_on(tokenizer: Implementation, documents: Iterable[str], trainer: Any) -> Implementation:
    """Returns a tokenizer after training it on documents, on all cores."""
    with threads():
        tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def byte_alphabet() -> list[str]:
    """Returns the 256 characters that represent bytes, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@contextmanager
def threads() -> Iterator[None]:
    """Lets `tokenizers` use threads in this block only, unless the user has set TOKENIZERS_PARALLELISM.

    Its thread pool does not survive a fork: a child process that uses its parent's pool hangs, and the library warns
    in every data worker that is forked after the pool was used.
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
