"""Text with spans taken out, for networks with an encoder and a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.contracts import PackedBatches
from core.errors import ConfigError
from core.pretrain_datamodule import PretrainDataModule
from core.technique import Feature, technique
from datamodules.corruption.corrupted_batches import CorruptedBatches
from datamodules.corruption.spans import Spans
from datamodules.corruption.vocabulary import read_vocabulary


@technique(
    paper="T5, arXiv:1910.10683, sections 3.1.4 and 3.3.4: 15% of the tokens, spans of 3",
    needs=(Feature("span_objective"),),
    offers=("exact_resume", "corrupted_spans"),
)
class SpanCorruptionDataModule(PretrainDataModule):
    """The rows of PretrainDataModule with spans replaced by sentinels; the target has the sentinels with their spans.

    A row of 568 tokens becomes 512 inputs and a target of 114, its end included: `sequence_length` counts the inputs. A batch
    has `input_ids` (B, T), `labels` (B, S), the target, and `decoder_input_ids` (B, S), the target one place later behind
    `decoder_start_id`. What is taken out depends on the seed and on the number of the row in the run: it is new in each
    epoch, and the same after a resume, with any number of ranks and workers. In validation it is always the same.

    Where rows are padded, padding has document id -1. Rows with several documents that are kept apart are refused.

    Args:
        noise_density: Share of the tokens that are taken out.
        mean_span_length: Tokens in a span, on average.
        extra_ids: So many sentinels are put behind the vocabulary, the last id being the first sentinel; 0: those
            of the tokenizer, `<extra_id_0>` and so on.
        decoder_start_id: What the decoder reads before the target; that of the network.

    Raises:
        ConfigError: If a number is out of range; in `setup`, if there are fewer sentinels than spans in a row; while reading,
            if documents are kept apart.

    Example:
        model:
          network:
            class_path: T5
            init_args: {n_layer: 2, n_head: 4, n_embd: 128, head_dim: 32, intermediate_size: 256}
          objective: SpanCorruption
        data:
          class_path: SpanCorruptionDataModule
          init_args:
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 2048}}
            writer: TokenShards
            packing: Concatenate
            extra_ids: 100
    """

    def __init__(
        self,
        *args: Any,
        noise_density: float = 0.15,
        mean_span_length: float = 3.0,
        extra_ids: int = 0,
        decoder_start_id: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0 < noise_density < 1:
            raise ConfigError(f"data.noise_density is {noise_density}; it must be above 0 and below 1.")
        for name, value, least in (
            ("mean_span_length", mean_span_length, 1),
            ("extra_ids", extra_ids, 0),
            ("decoder_start_id", decoder_start_id, 0),
        ):
            if not least <= value < float("inf"):
                raise ConfigError(f"data.{name} is {value}; it must be at least {least}.")
        if self.sequence_length < 4:
            raise ConfigError(
                f"data.sequence_length is {self.sequence_length}; rows with spans have at least 4 tokens."
            )
        self.noise_density, self.mean_span_length = noise_density, mean_span_length
        self.extra_ids, self.decoder_start_id = extra_ids, decoder_start_id
        if self.prepared is not None:
            # the vocabulary is known, and compared with the network's, before `setup`
            self.vocab_size += extra_ids

    def setup(self, stage: str | None = None) -> None:
        """Finds the prepared folder and the sentinels.

        Raises:
            ConfigError: If there are too few of them.
        """
        super().setup(stage)
        size = self.vocab_size
        if self.extra_ids:
            self.vocab_size = size + self.extra_ids
            found = list(range(self.vocab_size - 1, size - 1, -1))
        else:
            ids = read_vocabulary(self.tokenizer_json, self.end_of_text_id).ids
            found = []
            while (number := ids.get(f"<extra_id_{len(found)}>")) is not None:
                found.append(number)
        if self.decoder_start_id >= self.vocab_size:
            raise ConfigError(
                f"data.decoder_start_id is {self.decoder_start_id}, and the vocabulary has {self.vocab_size} ids."
            )
        options = (self.noise_density, self.mean_span_length, self.decoder_start_id)
        self._spans = Spans(np.array(found, np.int64), self.end_of_text_id, *options)
        self._require_sentinels(self.sequence_length)

    def _require_sentinels(self, sequence_length: int) -> None:
        needed = self._spans.counts(self._spans.raw_length(sequence_length))[1]
        if needed > (there := len(self._spans.sentinels)):
            raise ConfigError(
                f"Rows of {sequence_length} tokens have {needed} spans, and there are {there or 'no'} sentinels: set "
                f"data.extra_ids={max(100, needed)}, and model.network.vocab_size to {self.vocab_size + max(100, needed)} or more."
            )

    def packed(self, split: str, **order: Any) -> PackedBatches:
        """Returns the batches of a split, with spans taken out."""
        raw = order | {"sequence_length": self._spans.raw_length(order["sequence_length"])}
        found = CorruptedBatches(super().packed(split, **raw), self._spans, order.get("seed", 0))
        found.sequence_length = order["sequence_length"]
        return found
