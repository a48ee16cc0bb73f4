"""Text with masked tokens, for networks that see it in both directions."""

from __future__ import annotations

from typing import Any

from core.contracts import PackedBatches
from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from core.technique import Feature, technique
from datamodules.corruption.corrupted_batches import CorruptedBatches
from datamodules.corruption.masking import Masking
from datamodules.corruption.vocabulary import Vocabulary, read_vocabulary

MASKS = ("[MASK]", "<mask>", "<|mask|>")
"""Common names of the mask; the first that exists is used."""


@technique(
    paper="BERT, arXiv:1810.04805, section 3.1; new masks in each epoch: RoBERTa, arXiv:1907.11692, section 4.1; whole "
    "words: BERT's release of May 2019",
    needs=(Feature("masked_objective"),),
    offers=("exact_resume", "masked_tokens"),
)
class MaskedDataModule(PretrainDataModule):
    """The rows of PretrainDataModule with tokens masked: the label of a chosen token is the token, others have none.

    Each word is chosen with probability `mask_share`. Of the tokens of chosen words 80% become the mask, 10% any token that
    is not special, and 10% stay. Special tokens and the end of a text are never chosen. Masks depend on the seed and on
    the number of the row in the run: they are new in each epoch, and the same after a resume, with any number of ranks
    and workers. Those of validation are always the same.

    Where the tokenizer has [CLS] and [SEP] (or <s> and </s>), a row begins and ends with them, as BERT expects it. Padding has
    document id -1.

    Args:
        mask_token: The mask, a token of the tokenizer or an id; None: `[MASK]`, `<mask>` or `<|mask|>`. An id behind the
            vocabulary counts as one more token.
        mask_share: Share of the tokens that are chosen.
        masked: Share of the chosen tokens that become the mask.
        random: Share of the chosen tokens that become another one.
        whole_words: Whether all pieces of a word are chosen together. Words are those of WordPiece, or letters and digits
            that no space divides.

    Raises:
        ConfigError: If a number is out of range, or, in `setup`, if the tokenizer has no mask.

    Example:
        model:
          network:
            class_path: BERT
            init_args: {n_layer: 4, n_head: 4, n_embd: 128, intermediate_size: 512, max_sequence_length: 256}
          objective: MaskedLM
        data:
          class_path: MaskedDataModule
          init_args:
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 2048, special_tokens: ["[MASK]"]}}
            writer: TokenShards
            packing: Concatenate
            mask_share: 0.15
    """

    def __init__(
        self,
        *args: Any,
        mask_token: str | int | None = None,
        mask_share: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
        whole_words: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, least in (
            ("mask_share", mask_share, 1e-9),
            ("masked", masked, 0),
            ("random", random, 0),
        ):
            if not least <= value <= 1:
                raise ConfigError(
                    f"data.{name} is {value}; it must be {'above 0' if least else 'at least 0'}, and at most 1."
                )
        if masked + random > 1 + 1e-9:
            raise ConfigError(
                f"data.masked and data.random are {masked} and {random}; together they are at most 1."
            )
        if self.sequence_length < 3:
            raise ConfigError(
                f"data.sequence_length is {self.sequence_length}; masked rows have at least 3 tokens."
            )
        self.mask_token, self.mask_share, self.whole_words = mask_token, mask_share, whole_words
        self.masked, self.random = masked, random
        if self.prepared is not None and isinstance(mask_token, int):
            # the vocabulary is known, and compared with the network's, before `setup`
            self.vocab_size = max(self.vocab_size, mask_token + 1)

    def setup(self, stage: str | None = None) -> None:
        """Finds the prepared folder and the mask.

        Raises:
            ConfigError: If the tokenizer has no mask.
        """
        super().setup(stage)
        self._vocabulary = read_vocabulary(self.tokenizer_json, self.end_of_text_id)
        self._mask_id = self._find_mask(self._vocabulary)
        self.vocab_size = max(self.vocab_size, self._mask_id + 1)

    def _find_mask(self, vocabulary: Vocabulary) -> int:
        if isinstance(self.mask_token, int):
            if self.mask_token < 0:
                raise ConfigError(f"data.mask_token is {self.mask_token}; an id is at least 0.")
            return self.mask_token
        names = MASKS if self.mask_token is None else (self.mask_token,)
        found = next((name for name in names if name in vocabulary.ids), None)
        if found is None:
            raise ConfigError(
                f"The tokenizer has no mask ({', '.join(names)}): give a trained one special_tokens=['[MASK]'], or set "
                f"data.mask_token to one of its tokens, or to the free id {self.vocab_size}."
            )
        return vocabulary.ids[found]

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the batches of a split, masked."""
        options = (self.mask_share, self.masked, self.random, self.whole_words)
        masking = Masking(self._vocabulary, self._mask_id, *options)
        raw = order | {"sequence_length": masking.raw_length(order["sequence_length"])}
        found = CorruptedBatches(super().packed(split, **raw), masking, order.get("seed", 0))
        found.sequence_length = order["sequence_length"]
        return found
