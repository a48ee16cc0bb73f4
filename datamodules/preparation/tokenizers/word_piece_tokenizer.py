"""Trains a byte-level WordPiece tokenizer on the documents of the run."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Implementation

from core.technique import technique
from datamodules.preparation.tokenizers.library_tokenizer import END_OF_TEXT, TrainedTokenizer, byte_alphabet

CONTINUES = "‿"
"""Prefix of pieces that continue a word; BERT's "##" may also begin a word of a text."""

_LONGEST = 32  # bytes of a word: the time of a longest match is quadratic in its length


@technique(paper="Wu et al., arXiv:1609.08144, section 4.1; longest match first as in BERT, arXiv:1810.04805")
class WordPieceTokenizer(TrainedTokenizer):
    """Byte-level WordPiece: each word is split into the longest known pieces, from its start to its end.

    The vocabulary is trained as for BPE, but pieces at the start of a word differ from pieces within a word, and
    encoding takes the longest piece that fits instead of applying merges in order. Unlike BERT's, this tokenizer is
    lossless: each byte is a piece in both places, so there is no [UNK], and spaces belong to the words that they
    precede. Words are cut after 32 bytes. The text `<|endoftext|>` in a document is encoded as ordinary text. The
    same documents give the same tokenizer.

    Args:
        vocab_size: Number of ids, at least 513.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on.

    Raises:
        ConfigError: If `vocab_size` is below 513. In `prepare`: if the text is too short for that; says
            how many ids it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: WordPieceTokenizer, init_args: {vocab_size: 4096}}
    """

    _LEAST = 2 * 256 + 1
    _BECAUSE = f"256 bytes at the start of a word, 256 within one and {END_OF_TEXT}"

    def _trained(self, documents: Iterable[str]) -> Implementation:
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
