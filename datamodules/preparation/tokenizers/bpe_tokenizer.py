"""Trains a byte-level byte-pair-encoding tokenizer on the documents of the run."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Implementation
from tokenizers import decoders, models, trainers

from core.technique import technique
from datamodules.preparation.tokenizers.library_tokenizer import TrainedTokenizer


@technique(
    paper="Sennrich et al., arXiv:1508.07909; on bytes as in GPT-2 (Radford et al., 2019, section 2.2)",
    maturity="stable",
)
class BPETokenizer(TrainedTokenizer):
    """Byte-level BPE: any text is encoded, and decoded to exactly what it was.

    The ids are the end-of-text id 0, the 256 bytes, then merges, most frequent first. Text is cut by
    GPT-2's pattern before merging. The text `<|endoftext|>` in a document is encoded as ordinary text.
    The same documents give the same tokenizer.

    Args:
        vocab_size: Number of ids, at least 257. Short texts may yield fewer: a pair is merged only if it
            occurs twice. The attribute `vocab_size` is the requested number until `prepare`, then the
            actual one.
        special_tokens: Further tokens that no text is encoded to, such as [MASK]; ids 1 and on.

    Raises:
        ConfigError: If `vocab_size` is below 257 and the special tokens, or one of these is there twice.

    Example:
        data:
          init_args:
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 4096}}
    """

    def _trained(self, documents: Iterable[str]) -> Implementation:
        trainer = trainers.BpeTrainer(min_frequency=2, **self._trainer_options())
        tokenizer = self._train(models.BPE(), trainer, documents)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
