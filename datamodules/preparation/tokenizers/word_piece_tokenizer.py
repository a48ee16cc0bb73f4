"""Trains a WordPiece tokenizer on the documents of the run: on bytes, or on characters as BERT does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Implementation

from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.tokenizers.characters import counted, most_frequent
from datamodules.preparation.tokenizers.library_tokenizer import (
    END_OF_TEXT,
    TrainedTokenizer,
    byte_alphabet,
    trained_on,
)

CONTINUES = "‿"
"""Prefix of pieces of bytes that continue a word; BERT's "##" may also begin a word of a text."""

_LONGEST = 32  # bytes of a word: the time of a longest match is quadratic in its length

_UNKNOWN, _BERT_CONTINUES = "[UNK]", "##"
_BERT_LONGEST, _BERT_CHARACTERS = 100, 1000  # of a word; of the alphabet


@technique(paper="Wu et al., arXiv:1609.08144, section 4.1; longest match first as in BERT, arXiv:1810.04805")
class WordPieceTokenizer(TrainedTokenizer):
    """WordPiece: each word is split into the longest known pieces, from its start to its end.

    The vocabulary is trained as for BPE, but pieces at the start of a word differ from pieces within a word, and
    encoding takes the longest piece that fits instead of applying merges in order.

    With `unknown: bytes` this tokenizer is lossless: each byte is a piece in both places, so there is no [UNK], and spaces
    belong to the words that they precede. Words are cut after 32 bytes.

    With `unknown: unk` it is BERT's: control characters are removed, text is split at white space, punctuation and
    Chinese characters, pieces that continue a word begin with "##", and a word with an unknown character, or of more
    than 100, is [UNK]. White space is lost, [UNK]s are, and with `lower_case` capitals and accents: decoding
    gives a text like the original one. The alphabet is the 1,000 most frequent characters.

    The text `<|endoftext|>` in a document is encoded as ordinary text. The same documents give the same tokenizer.

    Args:
        vocab_size: Number of ids, at least 513 with `unknown: bytes`.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on, after [UNK].
        unknown: What unknown characters become: `bytes`, or `unk`, the token [UNK].
        lower_case: Whether text is put into lower case and its accents removed, as for BERT's uncased models; with
            `unknown: unk`.

    Raises:
        ConfigError: If `vocab_size` is too low, or `lower_case` is set with `unknown: bytes`. In `prepare`: if the text is
            too short for it; says how many ids it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: WordPieceTokenizer, init_args: {vocab_size: 4096}}
    """

    _LEAST = 2 * 256 + 1
    _BECAUSE = f"256 bytes at the start of a word, 256 within one and {END_OF_TEXT}"

    def __init__(
        self,
        vocab_size: int = 4096,
        special_tokens: Sequence[str] = (),
        unknown: Literal["bytes", "unk"] = "bytes",
        lower_case: bool = False,
    ) -> None:
        if lower_case and unknown == "bytes":
            raise ConfigError(
                "WordPieceTokenizer: lower_case loses capitals and accents, unknown: bytes loses nothing. Add unknown: unk."
            )
        self.unknown, self.lower_case = unknown, lower_case
        if unknown == "unk":
            self._LEAST, self._BECAUSE = 3, f"{END_OF_TEXT} and a character in two places"
            special_tokens = [_UNKNOWN, *special_tokens]
        super().__init__(vocab_size, special_tokens)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the requested number of ids, the special tokens if there are any, and options that are not the default."""
        more = {"unknown": self.unknown, "lower_case": self.lower_case} if self.unknown == "unk" else {}
        return {**super().fingerprint(), **more}

    def _trained(self, documents: Iterable[str]) -> Implementation:
        return self._of_bytes(documents) if self.unknown == "bytes" else self._as_bert(documents)

    def _of_bytes(self, documents: Iterable[str]) -> Implementation:
        # As special tokens, all bytes within words get ids, and these do not depend on the random order in which
        # the trainer visits words.
        within = [CONTINUES + byte for byte in byte_alphabet()]
        trainer = trainers.WordPieceTrainer(
            min_frequency=2,
            continuing_subword_prefix=CONTINUES,
            **self._trainer_options() | {"special_tokens": [*self._special, *within]},
        )
        parts = {"unk_token": END_OF_TEXT, "continuing_subword_prefix": CONTINUES}
        cut = pre_tokenizers.Split(Regex(f".{{{_LONGEST}}}"), "isolated")
        trained = self._train(models.WordPiece(**parts), trainer, documents, cut)
        self._require_all(trained.get_vocab_size())
        model = models.WordPiece(trained.get_vocab(), max_input_chars_per_word=_LONGEST, **parts)
        tokenizer = Implementation(model)  # a new one: in `trained` the bytes within words are special tokens
        tokenizer.pre_tokenizer = trained.pre_tokenizer
        tokenizer.decoder = decoders.Sequence([decoders.Replace(CONTINUES, ""), decoders.ByteLevel()])
        tokenizer.add_special_tokens(self._special)
        return tokenizer

    def _as_bert(self, documents: Iterable[str]) -> Implementation:
        """Returns the tokenizer of BERT; training alone cuts long words, of which there may be a page."""
        parts = {"unk_token": _UNKNOWN, "continuing_subword_prefix": _BERT_CONTINUES}
        normaliser = normalizers.BertNormalizer(lowercase=self.lower_case)
        with counted(documents) as (counts, again):
            alphabet = self._alphabet(counts, normaliser)
            within = [_BERT_CONTINUES + character for character in alphabet]
            trainer = trainers.WordPieceTrainer(
                min_frequency=2,
                continuing_subword_prefix=_BERT_CONTINUES,
                limit_alphabet=len(alphabet),
                **self._trainer_options()
                | {"special_tokens": [*self._special, *within], "initial_alphabet": alphabet},
            )
            trained = Implementation(models.WordPiece(**parts))
            trained.normalizer = normaliser
            words = pre_tokenizers.BertPreTokenizer()
            cut = pre_tokenizers.Split(Regex(f".{{{_BERT_LONGEST}}}"), "isolated")
            trained.pre_tokenizer = pre_tokenizers.Sequence([words, cut])
            vocabulary = trained_on(trained, again, trainer).get_vocab()
        self._require_all(len(vocabulary))
        tokenizer = Implementation(
            models.WordPiece(vocabulary, max_input_chars_per_word=_BERT_LONGEST, **parts)
        )
        tokenizer.normalizer, tokenizer.pre_tokenizer = normaliser, words
        tokenizer.decoder = decoders.WordPiece(_BERT_CONTINUES)
        tokenizer.add_special_tokens(self._special)
        return tokenizer

    def _alphabet(self, counts: Counter[str], normaliser: normalizers.Normalizer) -> list[str]:
        """Returns the most frequent characters as they are after normalization, each of which takes two ids, half of all at most."""
        found: Counter[str] = Counter()
        for character, count in counts.items():
            for one in normaliser.normalize_str(character):
                if not one.isspace():
                    found[one] += count
        room = (self._wanted - len(self._special)) // 4
        return most_frequent(found, max(1, min(_BERT_CHARACTERS, room)))
