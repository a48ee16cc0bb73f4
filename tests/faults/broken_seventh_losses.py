"""Objectives as their users wrote them, each with a mistake; for the seventh set of faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, TokenSum
from plugins.objectives.balanced_routing import BalancedRouting
from plugins.objectives.causal_lm import CausalLM

Sums = tuple[TokenSum, dict[str, TokenSum]]


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class ScaledByHand(CausalLM):
    """Scales the loss's gradient as for fp16; nothing divides gradients by it afterwards.

    Args:
        scale: The factor.
    """

    def __init__(self, scale: float = 1024.0) -> None:
        super().__init__()
        self.scale = scale

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Sums:
        found, figures = super().loss(network, batch)
        total: Tensor = _Scaled.apply(found.total, self.scale)
        return TokenSum(total, found.tokens), figures


class ShiftsLabels(CausalLM):
    """Shifts labels by one, as for a batch whose labels are its ids; those of this framework are shifted."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Sums:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        return super().loss(network, {**batch, "labels": labels})


class MinusZLoss(CausalLM):
    """Has a z-loss of its own, which is subtracted instead of added.

    Args:
        coefficient: Of the mean square of log Z.
    """

    def __init__(self, coefficient: float = 1e-2) -> None:
        super().__init__()
        self.coefficient = coefficient

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Sums:
        labels = batch["labels"]
        logits = network.logits(network(batch)).float()
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        seen = labels != IGNORED_LABEL
        if self.training:
            total = total - self.coefficient * (logits.logsumexp(-1).square() * seen).sum()
        return TokenSum(total, seen.sum()), {}


class MeanOfAnswers(CausalLM):
    """Averages over each row's answer, which begins after a marker. A row without the marker is 0 / 0.

    Args:
        marker: The token.
    """

    def __init__(self, marker: int) -> None:
        super().__init__()
        self.marker = marker

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Sums:
        labels = batch["labels"]
        logits = network.logits(network(batch)).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none")
        seen = labels != IGNORED_LABEL
        answers = (batch["input_ids"] == self.marker).cumsum(1).bool() & seen
        rows = (losses * answers).sum(1) / answers.sum(1)
        tokens = seen.sum()
        return TokenSum(rows.mean() * tokens, tokens), {}


class MinusBalance(BalancedRouting):
    """Balances experts with a loss that is subtracted: the network is rewarded for using few of them."""

    def __init__(self, objective: CausalLM, load_balancing: float = 0.01, z_loss: float = 0.0) -> None:
        super().__init__(objective, load_balancing, z_loss)
        self.load_balancing = -load_balancing
