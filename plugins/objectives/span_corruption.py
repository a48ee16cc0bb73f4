"""Prediction of spans that were taken out: the loss that T5 is trained with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.errors import ConfigError
from core.technique import Feature, technique
from plugins.objectives.causal_lm import cross_entropy
from plugins.objectives.chunked import sums_over_positions


@technique(
    paper="T5, arXiv:1910.10683, section 3.1.4",
    needs=(Feature("encoder_decoder"), Feature("corrupted_spans")),
    offers=("span_objective",),
)
class SpanCorruption(Objective):
    """Cross-entropy of the target's tokens, in nats: sentinels, the spans that they stand for, and the end.

    `SpanCorruptionDataModule` makes the targets. Logits (B, S, V) are converted to float32 first; where they are
    large, they are computed for some positions at a time.

    Args:
        z_loss: Coefficient of the mean square of log Z, the logarithm of the softmax's denominator; T5's training had 1e-4.
            Part of the training loss only, and logged as `train/z_loss`, without the coefficient, beside
            `train/cross_entropy`.

    Raises:
        ConfigError: If `z_loss` is below 0.

    Example:
        model:
          network:
            class_path: T5
            init_args: {n_layer: 2, n_head: 4, n_embd: 128, head_dim: 32, intermediate_size: 256}
          objective:
            class_path: SpanCorruption
            init_args: {z_loss: 1.0e-4}
        data:
          class_path: SpanCorruptionDataModule
          init_args:
            reader: TextDocuments
            tokenizer: {class_path: BPETokenizer, init_args: {vocab_size: 2048}}
            writer: TokenShards
            packing: Concatenate
            extra_ids: 100
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        if not 0 <= z_loss < float("inf"):
            raise ConfigError(f"SpanCorruption takes z_loss from 0 upwards, not {z_loss}.")
        self.z_loss = z_loss

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of label tokens, and its terms where there is a z-loss."""
        labels = batch["labels"]
        tokens = (labels != IGNORED_LABEL).sum()
        z_loss = self.z_loss if self.training else 0.0
        parts = partial(cross_entropy, z_loss=z_loss)
        total, plain, squares = sums_over_positions(parts, network, network(batch), labels).unbind()
        if not z_loss:
            return TokenSum(total, tokens), {}
        figures = {
            "cross_entropy": TokenSum(plain.detach(), tokens),
            "z_loss": TokenSum(squares.detach(), tokens),
        }
        return TokenSum(total, tokens), figures
