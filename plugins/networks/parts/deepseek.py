"""DeepSeek-V3's mixture of experts: sigmoid scores, a bias for the choice, groups, shared experts, dense blocks first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.sparse_decoder import new_sparse_mlp

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


def new_mlps(arguments: Mapping[str, Any]) -> Callable[[int], nn.Module]:
    """Returns what makes the MLP of a block, given its index: plain in the first `dense_layers`, then a mixture.

    Args:
        arguments: Those of the network, argument -> value, as DeepSeekV3 and Dots1 have them; others are ignored.
    """
    n_embd, expert_size = arguments["n_embd"], arguments["expert_size"]
    sizes = n_embd, arguments["n_experts"], arguments["experts_per_token"], expert_size
    routing = {name: arguments[name] for name in ("groups", "groups_per_token", "capacity_factor")}
    routing |= {"normalise": arguments["normalise_weights"], "scale": arguments["routing_scale"]}
    new_mlp = partial(MLP, n_embd, activation="silu", bias=False, gated=True)

    def new(index: int) -> nn.Module:
        if index < arguments["dense_layers"]:
            return new_mlp(arguments["intermediate_size"])
        shared = new_mlp(arguments["n_shared_experts"] * expert_size)
        return new_sparse_mlp(*sizes, shared, scores="sigmoid", biased=True, **routing)

    return new
