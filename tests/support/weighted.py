"""An objective whose tokens do not weigh the same."""

import torch.nn.functional as F

from core.contracts import IGNORED_LABEL, Objective, TokenSum


class RowWeighted(Objective):
    """Every row weighs a tenth, however many labels it has."""

    def loss(self, network, batch):
        labels = batch["labels"]
        logits = network.logits(network(batch)).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        counts = labels != IGNORED_LABEL
        weights = counts / counts.sum(1, keepdim=True).clamp(min=1) / 10
        plain = TokenSum(losses.sum().detach(), counts.sum())
        return TokenSum((losses.view_as(labels) * weights).sum(), counts.sum(), weights.sum()), {
            "plain": plain
        }
