"""Tensors that may be sharded over ranks (DTensors), and norms over all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["full_tensor", "gradients", "local_tensors", "reshard", "total_norm"]


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns this rank's shard of each tensor, or the tensor itself where it is not sharded; no copies."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor on every rank; all ranks have to call it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def reshard(module: nn.Module) -> None:
    """Frees the weights that FSDP has gathered, so that the next forward gathers the shards as they are now."""
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
    norms = [full_tensor(nn.utils.get_total_norm(group)) for group in by_mesh.values()] or [torch.zeros(())]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
