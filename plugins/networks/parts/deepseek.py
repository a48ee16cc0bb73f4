"""DeepSeek-V3's mixture of experts: sigmoid scores, a bias for the choice, groups, shared experts, dense blocks first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.moe import Experts, Router, SparseMLP

ARGUMENTS = {
    "attention_bias": "bias",
    "moe_intermediate_size": "expert_size",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "dense_layers",
    "n_group": "groups",
    "topk_group": "groups_per_token",
    "norm_topk_prob": "normalise_weights",
    "routed_scaling_factor": "routing_scale",
}
"""Keys of config.json -> arguments."""


def new_mlps(
    n_embd: int,
    *,
    intermediate_size: int,
    n_experts: int,
    experts_per_token: int,
    expert_size: int,
    n_shared_experts: int,
    dense_layers: int,
    **routing: Any,
) -> Callable[[int], nn.Module]:
    """Returns what makes the MLP of a block, given its index: plain in the first `dense_layers`, then a mixture.

    `routing` are further arguments of :class:`Router`.
    """
    new_mlp = partial(MLP, activation="silu", bias=False, gated=True)

    def new(index: int) -> nn.Module:
        if index < dense_layers:
            return new_mlp(n_embd, intermediate_size)
        router = Router(n_embd, n_experts, experts_per_token, scores="sigmoid", biased=True, **routing)
        shared = new_mlp(n_embd, n_shared_experts * expert_size)
        return SparseMLP(router, Experts(n_experts, n_embd, expert_size, "silu"), shared)

    return new
