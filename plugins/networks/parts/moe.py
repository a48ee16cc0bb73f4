"""Mixture of experts: a router, stacked experts, and the MLP that they are together.

Shapes: N tokens, C features, E experts of width I, k experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F

from core.training.shards import local_tensors
from plugins.networks.parts.mlp import ACTIVATIONS
from toolkit.routing import Routing

Scores = Literal["softmax", "sigmoid"]

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Multiplies each expert's tokens with its matrix."""

TRACES_FLOAT32 = Version(torch.__version__) >= Version("2.15.dev")
"""Whether torch's compiler knows grouped products in float32, which it multiplies on the CPU."""


class Router(nn.Module):
    """Chooses for each token the k experts of the highest scores.

    Args:
        n_embd: C.
        n_experts: E.
        experts_per_token: k.
        scores: "softmax": probabilities over all experts, as Mixtral, OLMoE and Qwen 3; "sigmoid": each by itself,
            as DeepSeek-V3, arXiv:2412.19437, equation 15, with logits in float32.
        normalise: Whether the weights of a token's experts sum to 1. With a softmax that is the softmax over the k
            highest logits alone.
        scale: What weights are multiplied with at last.
        biased: Whether there is a buffer `e_score_correction_bias` (E,), its name in transformers, which is added to the scores for the choice and not for the
            weights: see the callback BiasBalancing.
        groups: Experts lie in so many groups of equal size, and a token chooses among those of `groups_per_token`
            groups, the ones with the highest sum of their two highest scores; arXiv:2412.19437, section 2.1.2.
        groups_per_token: See there.
        capacity_factor: In training an expert has room for this times N k / E choices, rounded up; the first
            choices of all tokens come before the second ones, and earlier tokens before later ones (arXiv:2006.16668,
            algorithm 1). None: for all.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        n_embd: int,
        n_experts: int,
        experts_per_token: int,
        *,
        scores: Scores = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        biased: bool = False,
        groups: int = 1,
        groups_per_token: int = 1,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_embd))
        self.experts_per_token, self.scores, self.normalise, self.scale = (
            experts_per_token,
            scores,
            normalise,
            scale,
        )
        self.groups, self.groups_per_token, self.capacity_factor = groups, groups_per_token, capacity_factor
        self.register_buffer("e_score_correction_bias", torch.zeros(n_experts) if biased else None)

    def forward(self, x: Tensor) -> Routing:
        """Routes tokens (N, C)."""
        if self.scores == "softmax":
            logits = F.linear(x, self.weight)
            scores = probabilities = logits.softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        else:
            with torch.autocast(x.device.type, enabled=False):
                wide = torch.promote_types(x.dtype, torch.float32)
                logits = F.linear(x.to(wide), self.weight.to(wide))
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(dim=-1, keepdim=True)
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.normalise:
            tiny = 1e-20 if self.scores == "sigmoid" else 0.0  # as DeepSeek: all scores may be 0
            weights = weights / (weights.sum(dim=-1, keepdim=True) + tiny)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Routing(logits, probabilities, experts, weights, self._kept(experts))

    def _choose(self, scores: Tensor) -> Tensor:
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.groups > 1:
            grouped = scores.unflatten(1, (self.groups, -1))
            best = grouped.topk(2, dim=-1)[0].sum(-1).topk(self.groups_per_token, dim=-1)[1]
            inside = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
            scores = grouped.masked_fill(~inside.scatter(1, best, True)[..., None], -torch.inf).flatten(1)
        return scores.topk(self.experts_per_token, dim=-1)[1]

    def _kept(self, experts: Tensor) -> Tensor | None:
        if self.capacity_factor is None or not self.training:
            return None
        room = capacity(self.capacity_factor, experts, len(self.weight))
        return places(experts, len(self.weight)) < room


def capacity(factor: float, experts: Tensor, n_experts: int) -> int:
    """Returns how many of the choices (N, k) each expert has room for."""
    return math.ceil(factor * experts.numel() / n_experts)


def places(experts: Tensor, n_experts: int) -> Tensor:
    """Returns for choices (N, k) how many of the same expert come before: first choices first, then in order."""
    chosen = experts.t().flatten()
    ones = F.one_hot(chosen, n_experts)
    before = (ones.cumsum(0) - ones).gather(1, chosen[:, None])[:, 0]
    return before.view(experts.shape[1], -1).t()


class _Rows(torch.autograd.Function):
    """Rows of x (N, C), each k times, in an order (N k,) of these copies; gradients are added without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradient.index_select(0, ctx.saved_tensors[0])
        return rows.view(-1, ctx.copies, rows.shape[1]).sum(1), None, None, None


class Experts(nn.Module):
    """E gated MLPs without biases, stacked: expert e is down[e](activation(gate[e](x)) * up[e](x)).

    Args:
        n_experts: E.
        n_embd: C.
        intermediate_size: I.
        activation: Of the gate; a name of `ACTIVATIONS`.
    """

    def __init__(self, n_experts: int, n_embd: int, intermediate_size: int, activation: str):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Parameter(torch.empty(n_experts, intermediate_size, n_embd))
        self.up_proj = nn.Parameter(torch.empty(n_experts, intermediate_size, n_embd))
        self.down_proj = nn.Parameter(torch.empty(n_experts, n_embd, intermediate_size))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Maps tokens x (n, C), sorted by expert, to (n, C), given how many each expert has (E,)."""
        weights = local_tensors((self.gate_proj, self.up_proj, self.down_proj))
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        # of no rows torch refuses gradients of grouped products
        if len(x) and groups_products(x.device.type, dtype, weights[0].shape[1:]):
            ends = counts.cumsum(0).to(torch.int32)  # stays on the device
            return self._mlp(partial(_grouped, ends=ends, dtype=dtype), x, *weights)
        apart = self._one_by_one
        if torch.compiler.is_compiling():  # the numbers would be part of a graph: another one for each split
            # not a decorator, for which torch would load its compiler in every run
            apart = torch.compiler.disable(apart, reason="the experts' numbers of tokens differ in each step")
        return apart(x, counts, *weights)

    def _one_by_one(self, x: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        return self._mlp(partial(_looped, sizes=counts.tolist()), x, *weights)

    def _mlp(self, multiply: Multiply, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return multiply(self.activation(multiply(x, gate)) * multiply(x, up), down)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = F.grouped_mm(x.to(dtype), weight.to(dtype).transpose(1, 2), offs=ends)
    return found


def _looped(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    # experts without tokens, too: their gradient is then zero and not missing, on every rank
    return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(sizes), weight.unbind(), strict=True)])


def groups_products(device: str, dtype: torch.dtype, widths: Any) -> bool:
    """Whether torch multiplies groups of rows in one call: in bf16 on GPUs, also float32 on the CPU; by 16 bytes."""
    fits = (dtype is torch.bfloat16 and device == "cuda") or (dtype is torch.float32 and device == "cpu")
    fits = fits and (dtype is torch.bfloat16 or not torch.compiler.is_compiling() or TRACES_FLOAT32)
    return hasattr(F, "grouped_mm") and fits and all(width * dtype.itemsize % 16 == 0 for width in widths)


class SparseMLP(nn.Module):
    """A mixture of experts: each token's output is the weighted sum of those of the experts it is routed to.

    Without a capacity no token is dropped: tokens are sorted by expert. With one, experts have a fixed number of
    places, and what finds none adds nothing.

    Args:
        router: Returns a :class:`Routing`.
        experts: Maps tokens that are sorted by expert.
        shared: An MLP that every token passes, too; its output is added.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., C) to (..., C)."""
        flat = x.flatten(0, -2)
        routing = self.router(flat)
        found = self._sorted(flat, routing) if routing.kept is None else self._limited(flat, routing)
        y = (found * routing.weights[..., None].to(found.dtype)).sum(1).view(x.shape)
        return y if self.shared is None else y + self.shared(x)

    def _sorted(self, x: Tensor, routing: Routing) -> Tensor:
        """Returns what the chosen experts make of each token, (N, k, C)."""
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        back = order.argsort()
        counts = torch.zeros(len(self.router.weight), dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        y = self.experts(_Rows.apply(x, order, back, routing.experts.shape[1]), counts)
        return _Rows.apply(y, back, order, 1).view(*routing.experts.shape, -1)

    def _limited(self, x: Tensor, routing: Routing) -> Tensor:
        """As :meth:`_sorted`, with a fixed number of rows for each expert; zeros for what was dropped."""
        n_experts, factor = len(self.router.weight), self.router.capacity_factor
        assert factor is not None
        assert routing.kept is not None
        room = capacity(factor, routing.experts, n_experts)
        slots = routing.experts * room + places(routing.experts, n_experts)
        slots = torch.where(
            routing.kept, slots, n_experts * room
        ).flatten()  # what is dropped shares the last
        copies = x.repeat_interleave(routing.experts.shape[1], dim=0)
        rows = x.new_zeros(n_experts * room + 1, x.shape[1]).index_copy(0, slots, copies)[:-1]
        y = self.experts(rows, torch.full((n_experts,), room, device=x.device))
        return F.pad(y, (0, 0, 0, 1)).index_select(0, slots).view(*routing.experts.shape, -1)
