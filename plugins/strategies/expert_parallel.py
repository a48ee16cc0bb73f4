"""Expert parallelism: experts sharded over ranks with different tokens, each sent to the rank of its expert and back.

Shapes: E experts over P ranks, n tokens of this rank, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from core.contracts import Network
from toolkit.routing import RoutesTokens, count_experts


def apply(network: RoutesTokens, mesh: DeviceMesh) -> None:
    """Shards the experts of a network on the meta device; changes it in place.

    Args:
        network: Tensor parallelism may have sharded its experts along their width.
        mesh: The dimension "expert", or "expert" and "tensor".
    """
    for stack in network.expert_stacks:
        for module in stack.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                split = _split(weight.detach(), mesh)
                module.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))
        stack.forward = partial(exchanged, stack.forward, mesh.get_group("expert"))


def _split(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the experts of this rank, on the meta device; what is sharded over "tensor" stays so."""
    if mesh.ndim == 1:
        return distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    placements = weight.placements if isinstance(weight, DTensor) else (Replicate(),)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    own = local.chunk(mesh.size(0))[mesh.get_local_rank("expert")]
    return DTensor.from_local(
        own, mesh, (Shard(0), *placements), run_check=False, shape=weight.shape, stride=weight.stride()
    )


def stacks(network: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Returns the experts of a block, whose tokens they are sent."""
    own = {id(stack) for stack in network.expert_stacks} if isinstance(network, RoutesTokens) else set()
    return [module for module in block.modules() if id(module) in own]


def shard(stack: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shards experts, besides, over ranks that have the same ones: along a free dimension where that is even."""
    ranks = mesh.size(mesh.ndim - 1)
    fully_shard(stack, mesh=mesh, shard_placement_fn=lambda weight: Shard(_free(weight, ranks)), **options)


def _free(weight: Tensor, ranks: int) -> int:
    """Returns a dimension behind the experts that is not sharded yet and that the ranks divide; else that of the experts."""
    taken = (
        [place.dim for place in weight.placements if isinstance(place, Shard)]
        if isinstance(weight, DTensor)
        else []
    )
    return next(
        (dim for dim in range(1, weight.ndim) if dim not in taken and not weight.shape[dim] % ranks), 0
    )


def exchanged(
    experts: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup, x: Tensor, counts: Tensor
) -> Tensor:
    """Computes tokens with the experts of all ranks of a group; called on every rank of it.

    Args:
        experts: Maps tokens (m, C), sorted by this rank's E / P experts, and their numbers (E / P,) to (m, C).
        group: P ranks; rank p has experts p E / P and following.
        x: Tokens (n, C), sorted by expert; n may be 0 and differ from rank to rank.
        counts: How many tokens each expert has, (E,).

    Returns:
        What the experts made of this rank's tokens, (n, C). Gradients of the experts' weights are those of the tokens of
        all ranks over P, as if they were averaged like the gradients of other weights.
    """
    ranks = group.size()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sent, taken = torch.stack((counts, received)).view(2, ranks, -1).sum(2).tolist()
    x = _AllToAll.apply(x, sent, taken, group, float(ranks))
    own = len(counts) // ranks
    ids = torch.arange(own, device=x.device).repeat(ranks)
    order = ids.repeat_interleave(received, output_size=sum(taken)).argsort(stable=True)  # came rank by rank
    y = experts(x.index_select(0, order), received.view(ranks, own).sum(0))
    found: Tensor = _AllToAll.apply(y.index_select(0, order.argsort()), taken, sent, group, 1 / ranks)
    return found


class _AllToAll(torch.autograd.Function):
    """Sends rows to each rank, and takes rows from each; backward sends gradients back, times a factor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup, factor: float
    ) -> Tensor:
        ctx.given = sent, taken, group, factor
        return _all_to_all(x, sent, taken, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, taken, group, factor = ctx.given
        return _all_to_all(gradient, taken, sent, group).mul_(factor), None, None, None, None


def _all_to_all(x: Tensor, sent: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), taken, sent, group=group)
    return found


def compatibility_errors(network: Network, size: int, context: int) -> Iterator[str]:
    """Yields why the experts of a network cannot be sharded over `size` ranks."""
    if not isinstance(network, RoutesTokens):
        yield f"expert is {size}, and {type(network).__name__} has no experts: set it to 1"
        return
    experts = count_experts(network)
    if experts % size:
        yield f"expert is {size}, which does not divide the {experts} experts of {type(network).__name__}"
    if context > 1:
        yield f"expert is {size} and context {context}: set one of them to 1, and take data_shard for it"
