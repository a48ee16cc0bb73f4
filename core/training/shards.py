"""Tensors that may be spread over ranks (DTensors), and what is computed over all of a run's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns what this rank holds of each: itself, where it is not spread over ranks; no copies."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def is_spread(tensors: Sequence[Tensor]) -> bool:
    """Returns whether any of them is spread over ranks."""
    return torch.distributed.is_initialized() and any(hasattr(tensor, "to_local") for tensor in tensors)


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor, on every rank; all ranks have to call it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def take(target: Tensor, value: Tensor) -> None:
    """Copies a whole tensor, or this rank's part of it, into one that may be spread over ranks."""
    value = value.to(device=target.device, dtype=target.dtype)
    if hasattr(target, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        spread: Any = target
        value = distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(value)


def reshard(module: nn.Module) -> None:
    """Gives up what FSDP has gathered: it goes on with weights that were changed where they are spread."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nothing is gathered
        return
    for inner in module.modules():
        if isinstance(inner, fsdp.FSDPModule):
            inner.reshard()


def gradients(optimizer: Any) -> list[Tensor]:
    """Returns the gradients of what an optimizer steps."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of all together, 0-d, the same on every rank, without waiting for the device."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:  # norms over different meshes do not add up by themselves
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    norms = [whole(nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
