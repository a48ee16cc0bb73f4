"""Whole matrices of an optimizer that are sharded over ranks: each rank computes its share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.training.shards import full_tensor, local_tensors


def compute_whole(
    matrices: Sequence[Any], compute: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Returns this rank's shards of what a function makes of each whole matrix; called on every rank.

    Of as many matrices as there are ranks, each rank gets one whole, computes it, and sends its shards back: together they
    compute every matrix once. A matrix that is sharded in two ways is gathered and computed on each rank.

    Args:
        matrices: DTensors, in the same order on every rank.
        compute: Returns a matrix of the same shape.
        dtype: Of what `compute` returns.
    """
    found: list[Any] = [None] * len(matrices)
    shared: dict[Any, list[int]] = {}
    for number, matrix in enumerate(matrices):
        axes = [axis for axis, place in enumerate(matrix.placements) if not place.is_replicate()]
        if len(axes) == 1 and matrix.placements[axes[0]].is_shard():
            shared.setdefault((matrix.device_mesh, *axes), []).append(number)
        else:
            found[number] = _part(compute(full_tensor(matrix)), matrix)
    for (mesh, axis), numbers in shared.items():
        group = mesh.get_group(axis)
        numbers.sort(key=lambda number: -matrices[number].numel())  # of about one size at the same time
        for first in range(0, len(numbers), group.size()):
            some = numbers[first : first + group.size()]
            shards = _at_owners([matrices[number] for number in some], axis, group, compute, dtype)
            for number, shard in zip(some, shards, strict=True):
                found[number] = shard
    return found


def _at_owners(
    matrices: Sequence[Any], axis: int, group: Any, compute: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Returns this rank's shards of the results; the n-th matrix is computed on the n-th rank of the group."""
    ranks, own = group.size(), dist.get_rank(group)
    shards = local_tensors(matrices)
    sent = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
    given = torch.cat([shard.flatten() for shard in shards])
    result, got = given.new_empty(0, dtype=dtype), [0] * ranks
    if own < len(matrices):
        matrix = matrices[own]
        dim = matrix.placements[axis].dim
        lengths = _lengths(matrix.shape[dim], ranks)
        got = [length * (matrix.numel() // matrix.shape[dim]) for length in lengths]
    received = given.new_empty(sum(got))
    dist.all_to_all_single(received, given, got, sent, group)
    if own < len(matrices):
        shapes = [[*matrix.shape[:dim], length, *matrix.shape[dim + 1 :]] for length in lengths]
        parts = [part.view(shape) for part, shape in zip(received.split(got), shapes, strict=True)]
        computed = compute(torch.cat(parts, dim)).to(dtype)
        result = torch.cat([part.flatten() for part in computed.split(lengths, dim)])
    returned = given.new_empty(sum(sent), dtype=dtype)
    dist.all_to_all_single(returned, result, sent, got, group)
    pieces = returned.split(sent)
    return [piece.view_as(shard) for piece, shard in zip(pieces, shards, strict=False)]


def _lengths(size: int, ranks: int) -> list[int]:
    """Returns how many rows, or columns, each rank has: those of `torch.chunk`."""
    most = -(-size // ranks)
    return [min(most, max(size - rank * most, 0)) for rank in range(ranks)]


def _part(full: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return local_tensors([shard])[0]
