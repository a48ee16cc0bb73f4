"""What `plugins new` starts a network or an objective from, each with its test.

Each is a small technique that works, to be changed into another. `TechniqueName`, `technique_name` and
`technique-name` stand for its name.
"""

NETWORK = '''
"""A network without attention: each token is predicted from the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.contracts import Network
from core.technique import technique
from torch import Tensor, nn


@technique(paper="bigrams: Shannon, A Mathematical Theory of Communication (1948), 3", api="API_RANGE")
class TechniqueName(Network):
    """An embedding, residual MLPs and an output weight; no token sees those before it.

    Args:
        vocab_size: Rows V of the embedding and of the output weight.
        n_layer: MLPs.
        n_embd: Width C.

    Example:
        model:
          network:
            class_path: TechniqueName
            init_args: {vocab_size: 2048, n_layer: 2, n_embd: 64}
    """

    max_sequence_length = None

    def __init__(self, vocab_size: int = 2048, n_layer: int = 2, n_embd: int = 64) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(n_embd), nn.Linear(n_embd, n_embd), nn.GELU(), nn.Linear(n_embd, n_embd))
            for _ in range(n_layer)
        )
        self.norm = nn.RMSNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialises every parameter in place: also after `to_empty` from the meta device."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, batch: Mapping[str, Tensor], cache: Any = None) -> Tensor:
        """Returns hidden states (B, T, C)."""
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.norm(hidden)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The MLPs: what strategies shard, checkpoint and cut."""
        return self.layers

    @property
    def output_weight(self) -> Tensor:
        """The (V, C) weight of the head."""
        return self.head.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Returns 6 per weight of a matrix product: 2 forward, 4 backward."""
        weights = (module.weight for module in self.modules() if isinstance(module, nn.Linear))
        return 6.0 * sum(weight.numel() for weight in weights)
'''

NETWORK_TEST = '''
"""What TechniqueName computes."""

import torch

from leyden_technique_name.technique_name import TechniqueName


def test_no_position_depends_on_another():
    network = TechniqueName(vocab_size=7, n_layer=1, n_embd=4)
    one = network.logits(network({"input_ids": torch.tensor([[1, 2, 3, 4]])}))
    other = network.logits(network({"input_ids": torch.tensor([[1, 2, 6, 4]])}))
    assert one.shape == (1, 4, 7)
    assert (one != other).any(-1).tolist() == [[False, False, True, False]]


def test_the_operations_are_those_of_the_matrix_products():
    assert TechniqueName(vocab_size=7, n_layer=1, n_embd=4).flops_per_token(16) == 6 * (2 * 4 * 4 + 7 * 4)
'''

OBJECTIVE = '''
"""Next-token prediction with a z-loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from core.technique import technique
from torch import Tensor


@technique(paper="PaLM, arXiv:2204.02311, section 5: z-loss with weight 1e-4", api="API_RANGE")
class TechniqueName(Objective):
    """Minimises cross-entropy plus `weight` * log(Z)^2 per label token, Z the sum of exp(logits).

    The penalty keeps logits from drifting: they count only up to a constant in the cross-entropy.

    Args:
        weight: Of the penalty; 0 leaves plain cross-entropy.

    Example:
        model:
          objective:
            class_path: TechniqueName
            init_args: {weight: 1.0e-4}
    """

    def __init__(self, weight: float = 1e-4) -> None:
        super().__init__()
        self.weight = weight

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns the loss in nats, summed over label tokens, and the penalty before its weight as `z_loss`."""
        labels = batch["labels"].flatten()
        counted = labels != IGNORED_LABEL
        logits = network.logits(network(batch)).flatten(0, 1).float()
        entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        penalty = (logits.logsumexp(-1).square() * counted).sum()
        tokens = counted.sum()
        return TokenSum(entropy + self.weight * penalty, tokens), {"z_loss": TokenSum(penalty, tokens)}
'''

OBJECTIVE_TEST = '''
"""What TechniqueName computes."""

import math

import pytest
import torch

from leyden_technique_name.technique_name import TechniqueName


class Indifferent(torch.nn.Module):
    """Gives all of 8 tokens the logit 3."""

    def forward(self, batch):
        return torch.full((*batch["input_ids"].shape, 8), 3.0)

    def logits(self, hidden):
        return hidden


def test_the_loss_is_the_closed_form_and_ignores_what_has_no_label():
    batch = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.tensor([[1, -100, 2]])}
    loss, further = TechniqueName(weight=0.5).loss(Indifferent(), batch)
    log_z = 3 + math.log(8)
    assert loss.tokens == 2
    assert loss.mean == pytest.approx(math.log(8) + 0.5 * log_z**2)
    assert further["z_loss"].mean == pytest.approx(log_z**2)
'''

TEMPLATES = {"networks": (NETWORK, NETWORK_TEST), "objectives": (OBJECTIVE, OBJECTIVE_TEST)}
"""Kind -> the technique's module, and its tests."""
