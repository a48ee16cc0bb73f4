"""Objectives with the mistakes of the eighth set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from plugins.objectives.balanced_routing import BalancedRouting

Loss = tuple[TokenSum, dict[str, TokenSum]]


class Summed(Objective):
    """An objective whose loss is the sum over the tokens, not their mean.

    Args:
        objective: The objective.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Loss:
        """Returns the sum as the mean of one."""
        loss, figures = self.objective.loss(network, batch)
        return TokenSum(loss.total, loss.tokens, torch.ones_like(loss.total)), figures


class RowMeans(Objective):
    """Cross-entropy that weighs rows alike: the mean of the means of the rows."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Loss:
        """Returns the mean, times the tokens; of a row without a label it is 0 / 0."""
        labels = batch["labels"]
        kept = (labels != IGNORED_LABEL).float()
        likely = network.logits(network(batch)).float().log_softmax(-1)
        losses = -likely.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        rows = (losses * kept).sum(1) / kept.sum(1)
        return TokenSum(rows.mean() * kept.sum(), kept.sum()), {}


class RewardedNorm(Objective):
    """Cross-entropy with a z-loss that is subtracted, not added.

    Args:
        z_loss: Its coefficient.
    """

    def __init__(self, z_loss: float) -> None:
        super().__init__()
        self.z_loss = z_loss

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> Loss:
        """Returns the loss; in validation the cross-entropy alone."""
        labels = batch["labels"]
        logits = network.logits(network(batch)).float()
        total = F.cross_entropy(logits.mT, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        kept = labels != IGNORED_LABEL
        if self.training:
            total = total - self.z_loss * (logits.logsumexp(-1).square() * kept).sum()
        return TokenSum(total, kept.sum()), {}


class Unbalancing(BalancedRouting):
    """The balancing loss of experts, subtracted where it had to be added."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.load_balancing = -self.load_balancing
