"""Tensor-parallel and sequence-parallel plans of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plugins.networks.parts.attention import Attention
from plugins.networks.parts.latent_attention import LatentAttention
from plugins.networks.parts.mlp import MLP
from plugins.networks.parts.moe import Experts

if TYPE_CHECKING:
    from plugins.networks.parts.decoder import Decoder

NORMS = ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")


def tensor_parallel(network: nn.Module) -> dict[str, Any]:
    """Shards heads and MLP width."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    styles: dict[str, Callable[[], ParallelStyle]] = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), ColwiseParallel
    )
    styles |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)
    plan: dict[str, Any] = {
        n: styles[leaf]() for n, _ in network.named_modules() if (leaf := n.split(".")[-1]) in styles
    }
    for name, module in network.named_modules():
        if isinstance(module, Attention) and module.qk_norm is not None:
            plan |= {f"{name}.{norm}": _qk_norm(module.qk_norm) for norm in ("q_norm", "k_norm")}
        elif isinstance(module, LatentAttention):
            plan[f"{name}.shared_key"] = _summed()
        elif isinstance(module, Experts):
            plan[name] = _split_experts()
        if isinstance(module, Attention | MLP):
            plan[name] = _shared_input(split=False)
    return plan


def _shared_input(split: bool) -> Any:
    """Gives the projections of a module one DTensor: their gradients are added up before ranks exchange them, once for all.

    Args:
        split: Whether tokens are sharded outside of the module, and gathered for it.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ParallelStyle

    class SharedInput(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                x = _narrow(inputs[0])
                given = [Shard(1)] if split else [Replicate()]
                x = DTensor.from_local(x, device_mesh, given, run_check=False)
                return x.redistribute(placements=[Replicate()]), *inputs[1:]

            module.register_forward_pre_hook(before)
            return module

    return SharedInput()


def _narrow(x: Tensor) -> Tensor:
    """Casts a tensor to autocast's data type as the products that read it would, but before it is sent.

    A router with sigmoids, whose product is in float32, reads rounded tokens then, as in a network of that data type.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def narrowed(output: bool = False) -> Any:
    """Casts the first input of a module, or its output, to autocast's data type."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    class Narrowed(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            if output:
                module.register_forward_hook(lambda module, inputs, found: _narrow(found))
            else:
                module.register_forward_pre_hook(lambda module, inputs: (_narrow(inputs[0]), *inputs[1:]))
            return module

    return Narrowed()


def _split_experts() -> Any:
    """Shards the width of each expert: ranks have the same tokens, and what they make of them is added up."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class SplitExperts(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            for name, dim in {"gate_proj": 1, "up_proj": 1, "down_proj": 2}.items():
                weight = module.get_parameter(name)
                split = distribute_tensor(weight.detach(), device_mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))

            def before(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                x = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
                return x.to_local(grad_placements=[Partial()]), inputs[1]

            def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
                return parts.redistribute(placements=[Replicate()]).to_local()

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
            return module

    return SplitExperts()


def _summed() -> Any:
    """Leaves a tensor that all ranks have as it is, and sums its gradients over them: each has those of its heads."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.parallel import ParallelStyle

    class Summed(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                shared = DTensor.from_local(output, device_mesh, [Replicate()], run_check=False)
                return shared.to_local(grad_placements=[Partial()])

            module.register_forward_hook(hook)
            return module

    return Summed()


def _qk_norm(kind: str) -> Any:
    """Normalises the heads of this rank by themselves, or, where a norm is over all heads, gathers them for it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInputOutput, SequenceParallel

    if (
        kind == "head"
    ):  # of (B, T, heads, D) the heads are sharded; gradients of the weight are summed over ranks
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    sharded, replicated = Shard(2), Replicate()
    return PrepareModuleInputOutput(
        input_layouts=sharded,
        desired_input_layouts=replicated,
        use_local_input=True,
        output_layouts=replicated,
        desired_output_layouts=sharded,
    )


def sequence_parallel(network: Decoder) -> dict[str, Any]:
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
        whole = PrepareModuleInput(
            input_layouts=(split, *rest), desired_input_layouts=(replicated, *rest), use_local_output=True
        )
        return [narrowed(), whole]

    plan: dict[str, Any] = tensor_parallel(network)
    plan |= {n: RowwiseParallel(output_layouts=split) for n in plan if n.endswith(("o_proj", "down_proj"))}
    for name, block in network.layers.named_children():
        for part, inputs in {"attention": 4, "mlp": 1}.items():
            shares = isinstance(getattr(block, part, None), Attention | MLP)
            plan[f"layers.{name}.{part}"] = _shared_input(split=True) if shares else gathered(inputs)
        for norm in NORMS:
            if hasattr(block, norm):
                plan[f"layers.{name}.{norm}"] = SequenceParallel(use_local_output=True)
    plan["dropout"] = PrepareModuleOutput(output_layouts=replicated, desired_output_layouts=split)
    last = PrepareModuleOutput(output_layouts=split, desired_output_layouts=replicated)
    normalised = [] if isinstance(network.norm, nn.Identity) else [SequenceParallel()]
    plan["norm"] = [*normalised, narrowed(output=True), last]
    return plan
