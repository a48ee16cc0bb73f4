"""Networks, objectives and averages with bugs, for the unseen faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from callbacks.exponential_moving_average import ExponentialMovingAverage
from core.contracts import Network, Objective, TokenSum
from tests.faults.broken import FOREVER, Once


class Rewired(Callback):
    """Changes the network before the first step: a mistake in somebody's modelling code.

    Args:
        bug: A key of `WIRINGS`.
        amount: How much of it.
        first: The first step with it, of those that begin in the middle of a run.
    """

    def __init__(self, bug: str, amount: float = 1.0, first: int = 1) -> None:
        self.bug, self.amount, self.first = bug, amount, first

    @property
    def wirings(self) -> Mapping[str, Callable[..., None]]:
        """Bug -> what it does to a network, given `amount` and an `Age`."""
        return WIRINGS

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        change = self.wirings[self.bug]
        with torch.no_grad():
            change(pl_module.network, self.amount, lambda: trainer.global_step + 1 - self.first)


Age = Callable[[], int]
"""Returns the steps since a bug has begun; below 0: not yet."""


def _replace_attend(network: Any, change: Callable[..., Tensor]) -> None:
    for block in network.blocks:
        attend = block.attention.attend
        block.attention.attend = lambda q, k, v, mask=None, dropout=0.0, attend=attend, **more: change(
            attend, q, k, v, mask, dropout, **more
        )


def _attends_to_next(network: Any, amount: float, age: Age) -> None:
    """The causal mask is off by one: each token sees the one that follows."""

    def change(
        attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, **more: Any
    ) -> Tensor:
        length = q.shape[2]
        following = torch.ones(length, length, dtype=torch.bool).tril(1)
        mask = following if mask is None else mask | (following.triu(1) & _next_is_seen(mask))
        result: Tensor = attend(q, k, v, mask, dropout, **{**more, "is_causal": False})
        return result

    _replace_attend(network, change)


def _next_is_seen(mask: Tensor) -> Tensor:
    """Returns whether the token that follows sees this one: then both are of one document."""
    return mask.mT


def _wrong_scale(network: Any, amount: float, age: Age) -> None:
    """Scores are multiplied by a power of the width in the place of being divided by its root."""
    _replace_attend(network, lambda attend, q, *rest, **more: attend(q * amount, *rest, **more))


def _sees_both_sides(network: Any, amount: float, age: Age) -> None:
    """A convolution over the embeddings is padded on both sides in the place of the left one."""

    def mixed(module: Any, inputs: Any, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 1, 1))
        return x + amount * (padded[:, :-2] + padded[:, 2:])

    network.embed_tokens.register_forward_hook(mixed)


def _hard_cap(network: Any, amount: float, age: Age) -> None:
    """A soft cap on hidden states lies far below their size: its gradient is next to none."""
    network.blocks[1].register_forward_pre_hook(
        lambda module, inputs: (amount * torch.tanh(inputs[0] / amount), *inputs[1:])
    )


def _growing_gradient(network: Any, amount: float, age: Age) -> None:
    """The backward pass of a kernel becomes wrong by a factor that grows with each step."""

    def multiply(module: Any, inputs: Any) -> Any:
        x, gain = inputs[0], amount ** max(age(), 0)
        return (x.detach() + gain * (x - x.detach()), *inputs[1:])

    network.blocks[1].register_forward_pre_hook(multiply)


def _half_backward(network: Any, amount: float, age: Age) -> None:
    """Gradients of hidden states pass through fp16, without a loss scale that would suit them."""

    def rounded(gradient: Tensor) -> Tensor:
        return (gradient * amount).half().float() / amount

    def hook(module: Any, inputs: Any) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(rounded)

    for block in network.blocks:
        block.register_forward_pre_hook(hook)


def _nan_row(network: Any, amount: float, age: Age) -> None:
    """In one step a row of attention has nothing to attend to, and its softmax divides zero by zero."""

    def hook(module: Any, inputs: Any, x: Tensor) -> Tensor | None:
        if age() != 0 or not module.training:
            return None
        return torch.cat((x[:1] * float("nan"), x[1:]))

    network.blocks[-1].attention.register_forward_hook(hook)


def _skipped_block(network: Any, amount: float, age: Age) -> None:
    """The loop over blocks ends one too early: the last one has weights and does nothing."""
    network.blocks[-1].forward = lambda x, *rest, **more: x


def _same_units(network: Any, amount: float, age: Age) -> None:
    """All units of a layer begin with the same weights, and remain the same."""
    for block in network.blocks:
        for parameter in block.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter[:1].clone().expand_as(parameter))


def _loud_head(network: Any, amount: float, age: Age) -> None:
    """The output weights have a standard deviation of 1, as torch's nn.Embedding has."""
    network.output_weight.div_(network.output_weight.std())


def _untied(network: Any, amount: float, age: Age) -> None:
    """A copy took the place of the tied head after the optimizer was built."""
    weight = network.output_weight
    vocabulary, width = weight.shape
    network.lm_head = nn.Linear(width, vocabulary, bias=False)
    network.lm_head.weight.copy_(weight)


def _new_parameters(network: Any, amount: float, age: Age) -> None:
    """The MLPs' weights are new tensors, which the optimizer does not know: it goes on with the old ones."""
    for block in network.blocks:
        for module in block.mlp.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, copy.deepcopy(parameter))


WIRINGS: dict[str, Callable[[Any, float, Age], None]] = {
    "attends_to_next": _attends_to_next,
    "wrong_scale": _wrong_scale,
    "sees_both_sides": _sees_both_sides,
    "hard_cap": _hard_cap,
    "growing_gradient": _growing_gradient,
    "half_backward": _half_backward,
    "nan_row": _nan_row,
    "skipped_block": _skipped_block,
    "same_units": _same_units,
    "loud_head": _loud_head,
    "untied": _untied,
    "new_parameters": _new_parameters,
}


class Changing(Once):
    """Changes weights in the middle of a run.

    Args:
        bug: "louder_head", "dead_units", "frozen", "rounded" (to eight bits).
        amount: How much of it.
        first: The first step with it.
        last: The last step with it.
    """

    def __init__(self, bug: str, amount: float = 1.0, first: int = 1, last: int = FOREVER) -> None:
        self.bug, self.amount, self.first, self.last = bug, amount, first, last

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.strikes(trainer):
            return
        network = pl_module.network
        if self.bug == "louder_head":  # weight decay with the wrong sign
            network.output_weight.mul_(self.amount)
        if self.bug == "dead_units":
            for block in network.blocks:
                block.mlp.up_proj.bias.sub_(self.amount)
        if self.bug == "frozen":  # a schedule that was to unfreeze them
            network.blocks.requires_grad_(False)
        if self.bug == "rounded":  # weights are stored as float8 alone, without a copy in float32
            for parameter in network.parameters():
                parameter.copy_(parameter.to(torch.float8_e4m3fn))


class UnscaledSum(Objective):
    """An objective whose training loss is a sum over micro-batches that nobody divides by their number.

    Args:
        objective: The objective.
        parts: The number of micro-batches.
    """

    def __init__(self, objective: Objective, parts: int) -> None:
        super().__init__()
        self.objective, self.parts, self.loss_unit = objective, parts, objective.loss_unit

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        loss, figures = self.objective.loss(network, batch)
        if self.training:
            loss = TokenSum(loss.total * self.parts, loss.tokens, loss.weight)
        return loss, figures


class RewardedImbalance(Callback):
    """The loss that should balance experts has the wrong sign.

    Args:
        coefficient: Its coefficient.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.objective.load_balancing = -self.coefficient


class StuckAverage(ExponentialMovingAverage):
    """An average of the weights that follows copies of them, not the weights that are trained."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._copies = [weight.clone() for weight in self._pairs[1]]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        averages, weights = self._pairs
        self._pairs = averages, self._copies
        super().on_train_batch_end(trainer, pl_module, *rest)
        self._pairs = averages, weights


class AverageLeftIn(Callback):
    """Averages weights for validation, and does not put the trained ones back.

    Args:
        decay: Of the average, in each step.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: list[Tensor] = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = [p.detach() for p in pl_module.network.parameters()]
        if not self._average:
            self._average = [weight.clone() for weight in weights]
        torch._foreach_lerp_(self._average, weights, 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._average:
            torch._foreach_copy_([p.detach() for p in pl_module.network.parameters()], self._average)
