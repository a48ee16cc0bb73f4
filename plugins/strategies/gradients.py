"""Gradients that are sharded over ranks: norm, averaging, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from plugins.strategies.tensors import local_shard
from toolkit.gradient_buckets import average_in_buckets


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Returns the sum of the squares of full gradients, 0-d, in float32 or, of float64, in float64; called on every rank.

    Communicates once for each set of ranks over which gradients are sharded, not once for each gradient.
    """
    by_mesh: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        where: tuple[DeviceMesh | None, tuple[int, ...]] = (None, ())
        if isinstance(gradient, DTensor):
            dims = tuple(dim for dim, place in enumerate(gradient.placements) if not place.is_replicate())
            where = (gradient.device_mesh, dims)
        by_mesh.setdefault(where, []).append(local_shard(gradient))
    total: Tensor | None = None
    for (mesh, dims), parts in by_mesh.items():
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        squares = torch.stack(torch._foreach_norm(parts, 2, dtype)).square().sum()
        for dim in dims:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total = squares if total is None else total + squares
    assert total is not None
    return total


def summed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient with the placements of its parameter; partial sums are reduced."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def average_(gradients: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
    """Averages gradients over a group, in messages of a data type; None: their own."""
    average_in_buckets([local_shard(gradient) for gradient in gradients], group, dtype)


@torch.no_grad()
def scale_to_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scales gradients of norm `norm` to a norm of at most `limit`, without waiting for the device."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # the same epsilon as in torch's clip_grad_norm_
    parts = [local_shard(gradient) for gradient in gradients]
    torch._foreach_mul_(parts, factor.to(parts[0].device))


@torch.no_grad()
def clamp_(gradients: Sequence[Tensor], limit: float) -> None:
    """Clamps each value to [-limit, limit]."""
    parts = [local_shard(gradient) for gradient in gradients]
    torch._foreach_clamp_min_(parts, -limit)
    torch._foreach_clamp_max_(parts, limit)
