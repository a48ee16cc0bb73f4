"""Networks, objectives and averages with bugs, for the second unseen faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from callbacks.exponential_moving_average import ExponentialMovingAverage
from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from tests.faults.broken import Once

Wiring = Callable[[Any, float], None]


class Misbuilt(Callback):
    """Changes the network before the first step: a mistake in somebody's modelling code.

    Args:
        bug: A key of `WIRINGS`.
        amount: How much of it.
    """

    def __init__(self, bug: str, amount: float = 1.0) -> None:
        self.bug, self.amount = bug, amount

    @torch.no_grad()
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        WIRINGS[self.bug](pl_module.network, self.amount)


def _without_gradient(network: Any, amount: float) -> None:
    """The first block runs without gradients, as when it is evaluated."""
    network.blocks[0].register_forward_hook(lambda module, inputs, x: x.detach())


def _fading_skip(network: Any, amount: float) -> None:
    """What a block is given is multiplied by next to nothing, and only what the block adds goes on."""
    for block in network.blocks:
        block.register_forward_pre_hook(lambda module, inputs: (amount * inputs[0], *inputs[1:]))


def _norms_at_zero(network: Any, amount: float) -> None:
    """Norms multiply by their weight, which begins at zero: elsewhere it is one plus the weight."""
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.zero_()


def _small_branches(network: Any, amount: float) -> None:
    """What the first block adds is scaled to next to nothing."""
    block = network.blocks[0]
    for branch in (block.attention, block.mlp):
        branch.register_forward_hook(lambda module, inputs, x: amount * x)


def _shifted_relu(network: Any, amount: float) -> None:
    """The activation is a ReLU that begins far to the right, for sparsity."""
    for block in network.blocks:
        block.mlp.activation = lambda x: F.relu(x - amount)


def _steep_slopes(network: Any, amount: float) -> None:
    """Scores fall with distance, as with ALiBi, so steeply that a token sees itself alone."""

    def attend_by_distance(
        attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, **more: Any
    ) -> Tensor:
        places = torch.arange(q.shape[2])
        distance = places[:, None] - places
        seen = distance >= 0 if mask is None else mask
        scores = torch.where(seen, -amount * distance.float(), -torch.inf)
        found: Tensor = attend(q, k, v, scores, dropout, **{**more, "is_causal": False})
        return found

    for block in network.blocks:
        attend = block.attention.attend
        block.attention.attend = lambda q, k, v, mask=None, dropout=0.0, attend=attend, **more: (
            attend_by_distance(attend, q, k, v, mask, dropout, **more)
        )


def _dropped_tokens(network: Any, amount: float) -> None:
    """The embeddings of whole tokens are dropped in training."""

    def drop(module: Any, inputs: Any, x: Tensor) -> Tensor | None:
        return x * (torch.rand(*x.shape[:2], 1) >= amount) if module.training else None

    network.embed_tokens.register_forward_hook(drop)


def _biased_choice(network: Any, amount: float) -> None:
    """A bias for the choice of experts grows for those that have many tokens, and should fall."""

    def adjust(router: Any, inputs: Any, routing: Any) -> None:
        if router.training:
            bias = router.e_score_correction_bias
            loads = torch.bincount(routing.experts.flatten(), minlength=len(bias)).float()
            bias.add_(amount * torch.sign(loads - loads.mean()))

    for router in network.routers:
        router.e_score_correction_bias = torch.zeros(len(router.weight))
        router.register_forward_hook(adjust)


WIRINGS: dict[str, Wiring] = {
    "without_gradient": _without_gradient,
    "fading_skip": _fading_skip,
    "norms_at_zero": _norms_at_zero,
    "small_branches": _small_branches,
    "shifted_relu": _shifted_relu,
    "steep_slopes": _steep_slopes,
    "dropped_tokens": _dropped_tokens,
    "biased_choice": _biased_choice,
}


class MeanByHand(Objective):
    """An objective that divides the training loss by the number of label tokens itself.

    Args:
        objective: The objective.
        twice: Whether that is done once too often; otherwise only a batch without a label is at fault.
    """

    def __init__(self, objective: Objective, twice: bool = False) -> None:
        super().__init__()
        self.objective, self.twice, self.loss_unit = objective, twice, objective.loss_unit

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        loss, figures = self.objective.loss(network, batch)
        if self.training:
            mean = loss.total / loss.tokens
            loss = TokenSum(mean if self.twice else mean * loss.tokens, loss.tokens, loss.weight)
        return loss, figures


class NoLabels(Once):
    """Batches of some steps have no label: all their prompts are as long as a row."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            batch["labels"].fill_(IGNORED_LABEL)


class RewardedLogits(Callback):
    """The loss that should keep the softmax's denominator small has the wrong sign.

    Args:
        coefficient: Its coefficient.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        outer = pl_module.objective
        getattr(outer, "objective", outer).z_loss = -self.coefficient


class AverageWithoutStart(ExponentialMovingAverage):
    """An average that remembers the first weights for the whole run: its decay is that of long runs from step 1 on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._updates = 10**6
