"""Prediction of masked tokens: the loss that BERT is trained with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.technique import Feature, technique
from plugins.objectives.causal_lm import cross_entropy
from plugins.objectives.chunked import sums_over_positions
from toolkit.label_positions import at_labels


@technique(
    paper="BERT, arXiv:1810.04805, section 3.1",
    needs=(Feature("encoder"), Feature("masked_tokens")),
    offers=("masked_objective",),
)
class MaskedLM(Objective):
    """Cross-entropy of the tokens that were masked, in nats, summed over those that have a label.

    The label of a position is the token that was there, and -100 where none was chosen: `MaskedDataModule` makes such
    batches, and says in them which positions have a label: logits are computed for these alone, (B, M, V), with M a few more than
    a row has labels, and converted to float32; where they are large, for some positions at a time. A network that guesses by the frequency of tokens has about the
    loss that `RunSummary` prints as that of frequencies.

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
    """

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed loss with the number of label tokens."""
        hidden, labels = at_labels(network(batch), batch)
        sums = sums_over_positions(cross_entropy, network, hidden, labels)
        return TokenSum(sums[0], (labels != IGNORED_LABEL).sum()), {}
