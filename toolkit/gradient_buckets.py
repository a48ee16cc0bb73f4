"""Averages of many tensors over ranks in a few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average_in_buckets"]

BUCKET_BYTES = 25 * 2**20
"""Of a message, as in torch's DistributedDataParallel: a small one is mostly latency, a large one takes memory."""


@torch.no_grad()
def average_in_buckets(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None
) -> None:
    """Averages tensors over ranks, in place. Two messages at most are in memory at a time.

    Args:
        tensors: On each rank the same shapes in the same order.
        group: The ranks; None: all.
        dtype: Data type of the messages; None: that of the tensors.
    """
    ranks = dist.get_world_size(group)
    under_way: tuple[list[Tensor], Tensor, Any] | None = None
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket]).div_(ranks)
        flat = flat if dtype is None else flat.to(dtype)
        started = bucket, flat, dist.all_reduce(flat, group=group, async_op=True)
        _finish(under_way)
        under_way = started
    _finish(under_way)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors of one data type together, in their order, up to the size of a message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for found in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in found:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _finish(started: tuple[list[Tensor], Tensor, Any] | None) -> None:
    if started is None:
        return
    bucket, flat, work = started
    work.wait()
    parts = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])
