"""Trains a byte-level WordPiece tokenizer on the documents of the run."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Implementation

from core.technique import technique
from datamodules.preparation.library_tokenizer import END_OF_TEXT, TrainedTokenizer, byte_alphabet

CONTINUES = "‿"
"""Begins a piece that goes on with a word: "##" in BERT, but that may also begin a word of a text."""

_LONGEST = 32  # bytes of a word: the time of the longest match is quadratic in them


@technique(paper="Wu et al., arXiv:1609.08144, section 4.1; longest match first as in BERT, arXiv:1810.04805")
class WordPieceTokenizer(TrainedTokenizer):
    """WordPiece on bytes: each word is cut into the longest pieces known, from its start to its end.

    The vocabulary is trained as for BPE, but pieces at the start of a word and within it are different
    ones, and encoding knows no order of merges: it takes the longest piece that fits. Unlike BERT's, this one
    loses nothing: there is no [UNK], because each byte is a piece in both places, and spaces belong to the
    words they precede, so that decoding gives back the very text. Words are cut after 32 bytes. What spells
    `<|endoftext|>` in a document is encoded as ordinary text. The same documents give the same tokenizer.

    Args:
        vocab_size: Number of ids, at least 513.

    Raises:
        ConfigError: If `vocab_size` is below 513. In `prepare`: if the text is too short for as many; says
            how many it allows.

    Example:
        data:
          init_args:
            tokenizer: {class_path: WordPieceTokenizer, init_args: {vocab_size: 4096}}
    """

    _LEAST = 2 * 256 + 1
    _BECAUSE = f"256 bytes at the start of a word, 256 within one and {END_OF_TEXT}"

    def _trained(self, documents: Iterable[str]) -> Implementation:
        # Named in advance, the bytes within words are complete, and have ids that do not depend on the
        # random order in which the trainer meets its words.
        within = [CONTINUES + byte for byte in byte_alphabet()]
        trainer = trainers.WordPieceTrainer(
            vocab_size=self._wanted,
            min_frequency=2,
            special_tokens=[END_OF_TEXT, *within],
            initial_alphabet=byte_alphabet(),
            continuing_subword_prefix=CONTINUES,
            show_progress=False,
        )
        parts = {"unk_token": END_OF_TEXT, "continuing_subword_prefix": CONTINUES}
        cut = pre_tokenizers.Split(Regex(f".{{{_LONGEST}}}"), "isolated")
        trained = self._train(models.WordPiece(**parts), trainer, documents, cut)
        self._require_all(trained.get_vocab_size())
        model = models.WordPiece(trained.get_vocab(), max_input_chars_per_word=_LONGEST, **parts)
        tokenizer = Implementation(model)  # anew: there the bytes within words are special tokens
        tokenizer.pre_tokenizer = trained.pre_tokenizer
        tokenizer.decoder = decoders.Sequence([decoders.Replace(CONTINUES, ""), decoders.ByteLevel()])
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer
