"""Tensor-parallel and sequence-parallel plans of GPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from plugins.networks.gpt import GPT


def tensor_parallel(network: GPT) -> dict[str, Any]:
    """Shards heads and MLP width."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    styles: dict[str, Callable[[], ParallelStyle]] = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel
    )
    styles |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)
    return {n: styles[leaf]() for n, _ in network.named_modules() if (leaf := n.split(".")[-1]) in styles}


def sequence_parallel(network: GPT) -> dict[str, Any]:
    """Also shards tokens, where heads and MLP width are not sharded."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    replicated, split = Replicate(), Shard(1)

    def gathered(inputs: int) -> Any:
        rest = (None,) * (inputs - 1)
        return PrepareModuleInput(
            input_layouts=(split, *rest), desired_input_layouts=(replicated, *rest), use_local_output=True
        )

    plan: dict[str, Any] = tensor_parallel(network)
    plan |= {n: RowwiseParallel(output_layouts=split) for n in plan if n.endswith(("o_proj", "down_proj"))}
    for name, _ in network.layers.named_children():
        plan |= {f"layers.{name}.attention": gathered(4), f"layers.{name}.mlp": gathered(1)}
        for norm in ("attention_norm", "mlp_norm"):
            plan[f"layers.{name}.{norm}"] = SequenceParallel(use_local_output=True)
    plan["dropout"] = PrepareModuleOutput(output_layouts=replicated, desired_output_layouts=split)
    last = PrepareModuleOutput(output_layouts=split, desired_output_layouts=replicated)
    plan["norm"] = last if isinstance(network.norm, nn.Identity) else [SequenceParallel(), last]
    return plan
