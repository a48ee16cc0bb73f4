"""Optimizers, schedules and objectives with mistakes, for the sixth set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from tests.faults.broken_fourth_steps import FullDecayAdamW

PHASES = ((4, 0.3), (24, 1.0), (25, 50.0), (36, 0.5), (48, 0.2))
"""Until which step, and the share of the rate; one share was written in percent."""


class DecayApartAdamW(FullDecayAdamW):
    """AdamW of this kind: a step takes 10% of each weight."""


class KeepsGradients(Optimizer):
    """What does not set gradients to zero; the loop of the user did that, once."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves them."""


class KeepsGradientsAdamW(KeepsGradients, AdamW):
    """AdamW of this kind."""


class KeepsGradientsMuon(KeepsGradients, Muon):
    """Muon of this kind."""


class MasterAdamW(AdamW):
    """AdamW that steps a copy of the weights in float32, and does not copy it back."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        copies = [
            {**group, "params": [one.detach().float().clone() for one in group["params"]]}
            for group in self.param_groups
        ]
        self.masters = AdamW(copies, **options)

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group, copies in zip(self.param_groups, self.masters.param_groups, strict=True):
            copies["lr"] = group["lr"]
            for parameter, master in zip(group["params"], copies["params"], strict=True):
                master.grad = parameter.grad
        self.masters.step()
        return loss


class SettingsOnly(Optimizer):
    """What takes settings from a checkpoint and leaves its moments, to load faster."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})


class SettingsOnlyAdamW(SettingsOnly, AdamW):
    """AdamW of this kind."""


class SettingsOnlyMuon(SettingsOnly, Muon):
    """Muon of this kind."""


class InverseSquareRoot(LambdaLR):
    """The schedule of the transformer's paper, with its own warm-up.

    Args:
        optimizer: Its rates are the peaks.
        warmup_steps: Steps until the peak.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int) -> None:
        super().__init__(
            optimizer, lambda step: min((step + 1) / warmup_steps, (warmup_steps / (step + 1)) ** 0.5)
        )


class Phases(LambdaLR):
    """Rates by hand, from a table.

    Args:
        optimizer: Its rates are the peaks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, lambda step: next((share for end, share in PHASES if step < end), 0.2))


def logits_of(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    return network.logits(network(batch)).float()


class ShiftedAgain(Objective):
    """Cross-entropy that shifts the labels, which are shifted already."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        logits, labels = logits_of(network, batch)[:, :-1], batch["labels"][:, 1:]
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return TokenSum(total, (labels != IGNORED_LABEL).sum()), {}


class Summed(Objective):
    """Cross-entropy summed over the tokens of a batch, and divided by nothing."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        labels = batch["labels"]
        total = cross_entropy(logits_of(network, batch).flatten(0, 1), labels.flatten(), reduction="sum")
        return TokenSum(total, (labels != IGNORED_LABEL).sum(), torch.ones_like(total)), {}


class MeanOfRows(Objective):
    """Cross-entropy with weights that sum to 1 in each row, which is 0 / 0 in a row without labels."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        labels = batch["labels"]
        labelled = labels != IGNORED_LABEL
        found = logits_of(network, batch).log_softmax(-1)
        found = found.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        weights = labelled / labelled.sum(1, keepdim=True)
        tokens = labelled.sum()
        return TokenSum(-(weights * found).sum() / len(labels) * tokens, tokens), {}


class NegativeZLoss(Objective):
    """Cross-entropy with a z-loss whose sign is wrong.

    Args:
        z_loss: Its coefficient.
    """

    def __init__(self, z_loss: float) -> None:
        super().__init__()
        self.z_loss = z_loss

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        labels, logits = batch["labels"], logits_of(network, batch)
        labelled = labels != IGNORED_LABEL
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if self.training:
            total = total - self.z_loss * logits.logsumexp(-1)[labelled].square().sum()
        return TokenSum(total, labelled.sum()), {}
