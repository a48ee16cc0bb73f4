"""Backward without what forward computed: gradients have the right shapes and no meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

__all__ = ["ShapesOnly"]

SMALL = 1 << 16
"""Bytes up to which a tensor is kept: seeds, offsets and counts, whose values an operation may rely on."""


class ShapesOnly(saved_tensors_hooks):
    """Within it, forward keeps no activations for its backward, which gets zeros in their place.

    Forward and backward then make the same operations, on tensors of the same shapes, in the memory of the largest
    of them. Weights are kept: they are there anyway.
    """

    def __init__(self) -> None:
        super().__init__(_forgotten, _zeros)


def _forgotten(tensor: Tensor) -> Any:
    """Returns the tensor, or a function that makes zeros of its shape."""
    weight = tensor.is_leaf and tensor.requires_grad
    if weight or tensor.numel() * tensor.element_size() <= SMALL:
        return tensor
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = _maker(tensor.to_local())
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(
            local(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
    plain = type(tensor) in (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)
    return _maker(tensor) if plain else tensor


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _zeros(found: Any) -> Tensor:
    tensor: Tensor = found() if callable(found) else found
    return tensor
