"""Networks and objectives with bugs, for the third unseen faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum
from tests.faults.broken_parts import Age, Rewired
from tests.faults.recipes import VOCABULARY


class Miswired(Rewired):
    """Changes the network by a bug of this file's `WIRINGS`."""

    @property
    def wirings(self) -> Mapping[str, Callable[..., None]]:
        return WIRINGS


# -- gradients -------------------------------------------------------------------------------------------


def _norm_without_epsilon(network: Any, amount: float, age: Age) -> None:
    """A norm has no epsilon, and in one step a token's embedding is zero, as padding has it."""

    def zero(module: Any, inputs: Any, x: Tensor) -> Tensor | None:
        if age() != 0 or not module.training:
            return None
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, 1:]), dim=1)

    network.embed_tokens.register_forward_hook(zero)
    norm = network.blocks[0].attention_norm
    norm.forward = lambda x: norm.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


def _norms_divide_again(network: Any, amount: float, age: Age) -> None:
    """The backward pass of norms divides by the deviation more often than once."""

    def divide(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        gain = x.detach().square().mean(-1, keepdim=True).add(1e-12).rsqrt() ** amount
        return (x.detach() + gain * (x - x.detach()),)

    for block in network.blocks:
        for norm in (block.attention_norm, block.mlp_norm):
            norm.register_forward_pre_hook(divide)


def _sigmoids(network: Any, amount: float, age: Age) -> None:
    """Between two blocks lie several sigmoids, without a path around them."""

    def squash(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        for _layer in range(int(amount)):
            x = torch.sigmoid(x)
        return (x, *inputs[1:])

    network.blocks[1].register_forward_pre_hook(squash)


def _reentrant(network: Any, amount: float, age: Age) -> None:
    """Blocks are recomputed by reentrant checkpoints, and what they are given needs no gradient."""

    def recomputed(forward: Any) -> Any:
        return lambda x, *rest: checkpoint(forward, x, *rest, use_reentrant=True)

    network.embed_tokens.register_forward_hook(lambda module, inputs, x: x.detach())
    for block in network.blocks:
        block.forward = recomputed(block.forward)


# -- weights, activations and attention ------------------------------------------------------------------


def _added_tokens(network: Any, amount: float, age: Age) -> None:
    """The rows of added tokens have another deviation than those that were there."""
    for weight in {network.embed_tokens.weight, network.output_weight}:
        weight[-VOCABULARY // 3 :].normal_(0.0, amount)


def _eight_bits(network: Any, amount: float, age: Age) -> None:
    """What the last block adds passes through float8 with a scale for far larger numbers: all becomes zero."""

    def rounded(module: Any, inputs: Any, x: Tensor) -> Tensor:
        stored = (x.detach() * amount).to(torch.float8_e4m3fn).to(x.dtype) / amount
        return stored + 0 * x  # as are gradients

    block = network.blocks[-1]
    for branch in (block.attention, block.mlp):
        branch.register_forward_hook(rounded)


def _pruned(network: Any, amount: float, age: Age) -> None:
    """Of the units only a share is kept: the strongest ones in the first batch."""

    def masked(activation: Any) -> Any:
        kept: list[Tensor] = []

        def activate(x: Tensor) -> Tensor:
            y: Tensor = activation(x)
            if not kept:
                strength = y.detach().abs().flatten(0, -2).mean(0)
                least = strength.topk(max(1, round(amount * len(strength))))[0][-1]
                kept.append((strength >= least).to(y.dtype))
            return y * kept[0]

        return activate

    for block in network.blocks:
        block.mlp.activation = masked(block.mlp.activation)


def _sink(network: Any, amount: float, age: Age) -> None:
    """The first token that is seen has a bonus in the scores, and gets all of the attention."""

    def attend_first(
        attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, **more: Any
    ) -> Any:
        length = q.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
        first = seen & (seen.cumsum(-1) == 1)
        scores = torch.where(seen, amount * first.float(), -torch.inf)
        return attend(q, k, v, scores, dropout, **{**more, "is_causal": False})

    for block in network.blocks:
        attend = block.attention.attend
        block.attention.attend = lambda q, k, v, mask=None, dropout=0.0, attend=attend, **more: attend_first(
            attend, q, k, v, mask, dropout, **more
        )


def _inverted_mask(network: Any, amount: float, age: Age) -> None:
    """The mask of documents says what is hidden, where it should say what is seen: tokens see other documents alone."""

    def attend_others(
        attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **more: Any
    ) -> Any:
        if mask is not None:
            own = torch.eye(q.shape[2], dtype=torch.bool)
            mask = (~mask).tril() | own
        return attend(q, k, v, mask, *rest, **more)

    for block in network.blocks:
        attend = block.attention.attend
        block.attention.attend = lambda q, k, v, mask=None, dropout=0.0, attend=attend, **more: attend_others(
            attend, q, k, v, mask, dropout, **more
        )


def _common_part(network: Any, amount: float, age: Age) -> None:
    """What routers are given has a large part that is the same for all tokens."""
    for router in network.routers:
        router.register_forward_pre_hook(lambda module, inputs: (inputs[0] + amount,))


def _token_shift(network: Any, amount: float, age: Age) -> None:
    """A share of the features is shifted by one token, in the wrong direction."""

    def shift(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        width = round(amount * x.shape[-1])
        following = torch.cat((x[:, 1:, :width], torch.zeros_like(x[:, :1, :width])), dim=1)
        return (torch.cat((following, x[..., width:]), dim=-1), *inputs[1:])

    network.blocks[1].register_forward_pre_hook(shift)


def _head_dropout(network: Any, amount: float, age: Age) -> None:
    """What the head is given passes through the dropout of a small classifier."""
    network.norm.register_forward_hook(
        lambda module, inputs, x: torch.nn.functional.dropout(x, amount, module.training)
    )


WIRINGS: dict[str, Callable[[Any, float, Age], None]] = {
    "norm_without_epsilon": _norm_without_epsilon,
    "norms_divide_again": _norms_divide_again,
    "sigmoids": _sigmoids,
    "reentrant": _reentrant,
    "added_tokens": _added_tokens,
    "eight_bits": _eight_bits,
    "pruned": _pruned,
    "sink": _sink,
    "inverted_mask": _inverted_mask,
    "common_part": _common_part,
    "token_shift": _token_shift,
    "head_dropout": _head_dropout,
}


class Confident(Objective):
    """An objective with a term for the entropy of predictions, which has the wrong sign: it rewards confidence.

    Args:
        objective: The objective.
        coefficient: Of the term.
    """

    def __init__(self, objective: Objective, coefficient: float) -> None:
        super().__init__()
        self.objective, self.coefficient, self.loss_unit = objective, coefficient, objective.loss_unit

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        loss, figures = self.objective.loss(network, batch)
        if self.training:
            logs = network.logits(network(batch)).float().log_softmax(-1)
            entropies = -(logs.exp() * logs).sum(-1)
            total = entropies[batch["labels"] != IGNORED_LABEL].sum()
            loss = TokenSum(loss.total + self.coefficient * total, loss.tokens, loss.weight)
        return loss, figures
