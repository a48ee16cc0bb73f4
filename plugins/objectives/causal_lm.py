"""Next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.technique import technique


@technique(
    paper="GPT, Radford et al. 2018, section 3.1; the loss of every causal language model since",
    maturity="stable",
)
class CausalLM(Objective):
    """Minimises the cross-entropy of the next token, in nats, summed over the tokens that have a label.

    Logits (B, T, V) are compared in float32 whatever the precision of the network; positions whose
    label is -100 count neither in the sum nor in the number of tokens.

    Example:
        model:
          objective: CausalLM
    """

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the summed cross-entropy with the number of label tokens, and no further figures."""
        labels = batch["labels"]
        logits = network.logits(network(batch))
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return TokenSum(total, (labels != IGNORED_LABEL).sum()), {}
