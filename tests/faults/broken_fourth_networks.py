"""Networks and losses with a mistake, for the fourth set of faults.

Networks are the recipes' own, changed before training by a callback; losses are objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import IGNORED_LABEL, Network, Objective, TokenSum

Figures = dict[str, TokenSum]


class Rewritten(Callback):
    """Changes the network before training.

    Args:
        change: Name of a function of this module, which is called with the network.
        arguments: Its further arguments.
    """

    def __init__(self, change: str, **arguments: Any) -> None:
        self.change: Callable[..., None] = partial(globals()[change], **arguments)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Changes it."""
        self.change(pl_module.network)


def plain_layers(network: Any) -> None:
    """Blocks are layers one after the other, with neither residuals nor norms."""

    def forward(block: Any, x: Tensor, *rest: Any) -> Tensor:
        found: Tensor = block.mlp(block.attention(x, *rest))
        return found

    for block in network.blocks:
        block.forward = partial(forward, block)


def norms_by_variance(network: Any) -> None:
    """Norms divide by the variance: the square root is missing."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        if isinstance(norm, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
        return y if getattr(norm, "bias", None) is None else y + norm.bias

    norms = [norm for block in network.blocks for norm in (block.attention_norm, block.mlp_norm)]
    for norm in (*norms, network.norm):
        norm.forward = partial(forward, norm)


def gate_of_zero(network: Any, block: int) -> None:
    """A block has a gate on what it adds; it begins at 0, and is a plain tensor that nothing trains."""
    gated, gate = network.blocks[block], torch.zeros(())
    inner = gated.forward

    def forward(x: Tensor, *rest: Any) -> Tensor:
        found: Tensor = x + gate * (inner(x, *rest) - x)
        return found

    gated.forward = forward


def prior_biases(network: Any, value: float) -> None:
    """The bias of a rare class, as in RetinaNet's last layer, is set in the first layer of each MLP."""
    for block in network.blocks:
        nn.init.constant_(block.mlp.up_proj.bias, value)


def _attends(network: Any, attend: Callable[..., Tensor]) -> None:
    """Gives each block another function of attention, the first argument of which is the one it has."""
    for block in network.blocks:
        block.attention.attend = partial(attend, block.attention.attend)


def cosine_scores(network: Any, temperature: float) -> None:
    """Attention scores are cosines over a temperature that is far too low."""

    def attend(inner: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        options["scale"] = 1 / temperature
        found: Tensor = inner(F.normalize(q, dim=-1), F.normalize(k, dim=-1), *rest, **options)
        return found

    _attends(network, attend)


def in_both_directions(network: Any) -> None:
    """Attention is that of an encoder: a token sees those after it, in its document."""

    def attend(inner: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **options: Any) -> Tensor:
        options["is_causal"] = False
        found: Tensor = inner(q, k, v, None if mask is None else mask | mask.mT, *rest, **options)
        return found

    _attends(network, attend)


def causal_alone(network: Any) -> None:
    """Attention calls a kernel that is causal and takes no mask: documents of a row see each other."""

    def attend(inner: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **options: Any) -> Tensor:
        options["is_causal"] = True
        found: Tensor = inner(q, k, v, None, *rest, **options)
        return found

    _attends(network, attend)


class NewEmbeddings(Callback):
    """Gives the embeddings new weights, as a change of the vocabulary's size does, when the optimizer is made already."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replaces the parameters."""
        for module in pl_module.modules():
            if isinstance(module, nn.Embedding):
                module.weight = nn.Parameter(module.weight.detach().clone())


class LoadFeedback(Callback):
    """Balances experts by a bias on their scores, with the wrong sign: up where an expert had many tokens."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Gives routers a bias, and listens to what they choose."""
        for router in pl_module.network.routers:
            router.e_score_correction_bias = torch.zeros(len(router.weight))
            router.register_forward_hook(self._update)

    def _update(self, router: Any, inputs: Any, routing: Any) -> None:
        if router.training:
            bias = router.e_score_correction_bias
            load = torch.bincount(routing.experts.flatten(), minlength=len(bias)).float()
            bias.add_(torch.sign(load - load.mean()), alpha=self.rate)


class Around(Objective):
    """An objective around another.

    Args:
        objective: The other.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, Figures]:
        """Returns the other's loss."""
        return self.objective.loss(network, batch)


class ScaledLoss(Around):
    """Multiplies the training loss for gradients in float16, and never divides gradients again."""

    def __init__(self, objective: Objective, scale: float) -> None:
        super().__init__(objective)
        self.scale = scale

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, Figures]:
        """Returns the scaled loss."""
        loss, figures = super().loss(network, batch)
        factor = self.scale if self.training else 1.0
        return TokenSum(loss.total * factor, loss.tokens, loss.weight), figures


class ShiftedLoss(Around):
    """Shifts labels, as models of transformers do; those of the batch are shifted already."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, Figures]:
        """Returns the loss of the tokens after the next."""
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        return super().loss(network, {**batch, "labels": labels})


class RowMeans(Objective):
    """Cross-entropy of which each row weighs the same: a row without a label is 0 / 0."""

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, Figures]:
        """Returns the mean of the means of rows, times the number of tokens."""
        labels, logits = batch["labels"], network.logits(network(batch)).float()
        losses = F.cross_entropy(logits.mT, labels, ignore_index=IGNORED_LABEL, reduction="none")
        counts = (labels != IGNORED_LABEL).sum(1)
        if not self.training:
            return TokenSum(losses.sum(), counts.sum()), {}
        return TokenSum((losses.sum(1) / counts).mean() * counts.sum(), counts.sum()), {}


class RewardedNormaliser(Around):
    """Adds the mean square of log Z to the loss, with the wrong sign."""

    def __init__(self, objective: Objective, coefficient: float) -> None:
        super().__init__(objective)
        self.coefficient = coefficient

    def loss(self, network: Network, batch: Mapping[str, Tensor]) -> tuple[TokenSum, Figures]:
        """Returns the loss with the term, in training."""
        loss, figures = super().loss(network, batch)
        if not self.training:
            return loss, figures
        log_z = network.logits(network(batch)).float().logsumexp(-1)
        squares = log_z.square().where(batch["labels"] != IGNORED_LABEL, 0.0).sum()
        return TokenSum(loss.total - self.coefficient * squares, loss.tokens, loss.weight), figures
