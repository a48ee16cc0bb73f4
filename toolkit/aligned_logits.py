"""Logits of vocabularies whose size is not what kernels like: products with a copy of the output weight that has more rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.contracts import Network

__all__ = ["first_columns", "is_plain", "logits_of", "padded", "product_of"]

MULTIPLE = 64
"""Kernels are given a weight with a multiple of this many rows: with 50,257 they cannot load 16 bytes at a time."""


def logits_of(network: Network, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns what computes logits (..., V) of hidden states such as `hidden`; those of `network.logits` up to rounding.

    Where :func:`product_of` adds columns they are in float32 or wider.
    """
    weight = _weight_to_pad(network, hidden)
    if weight is None:
        return network.logits
    kernel = padded(weight)  # once for all calls
    return lambda rows: first_columns(F.linear(rows, kernel), len(weight))


def product_of(network: Network, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns what computes logits (..., V) of hidden states such as `hidden`, behind which there may be further columns.

    On CUDA the product is one with :func:`padded`, if the size of the vocabulary is no multiple of 64. On a CPU, where the copy
    costs more than it saves, in a compiled graph, where the compiler does it, and for networks with logits of their own it is
    `network.logits`.
    """
    weight = _weight_to_pad(network, hidden)
    if weight is None:
        return network.logits
    kernel = padded(weight)
    return lambda rows: F.linear(rows, kernel)


def _weight_to_pad(network: Network, hidden: Tensor) -> Tensor | None:
    if not hidden.is_cuda or torch.compiler.is_compiling():
        return None
    weight = network.output_weight
    if weight is None or len(weight) % MULTIPLE == 0 or not is_plain(network, weight):
        return None
    return weight


def is_plain(network: Network, weight: Tensor) -> bool:
    """Returns whether logits are products with the weight, and nothing else; strategies may replace the method."""
    own = getattr(network.logits, "__func__", None) is not Network.logits
    return not own and type(weight) in (Tensor, nn.Parameter)


def padded(weight: Tensor) -> Tensor:
    """Returns a weight (V, C) with further rows of zeros, a multiple of 64 in all, in autocast's data type.

    Under autocast it takes the place of a copy that is made anyway. Where neither changes anything, it is the weight itself.
    """
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    found: Tensor = _Rows.apply(weight, dtype) if len(weight) % MULTIPLE else weight.to(dtype)
    return found


def first_columns(x: Tensor, columns: int) -> Tensor:
    """Returns the first columns, in float32 or wider."""
    found: Tensor = _Columns.apply(x, columns)
    return found


class _Rows(torch.autograd.Function):
    """Further rows of zeros, in another data type: one pass over memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.rows, ctx.dtype = len(weight), weight.dtype
        found = weight.new_zeros((ctx.rows + -ctx.rows % MULTIPLE, *weight.shape[1:]), dtype=dtype)
        found[: ctx.rows] = weight
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][: ctx.rows].to(ctx.dtype), None


class _Columns(torch.autograd.Function):
    """One pass over memory forward and one backward, where slicing takes three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:
        ctx.shape, ctx.dtype, ctx.columns = x.shape, x.dtype, columns
        return x[..., :columns].to(torch.promote_types(x.dtype, torch.float32)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        found = gradients[0].new_empty(ctx.shape, dtype=ctx.dtype)
        found[..., : ctx.columns] = gradients[0]
        found[..., ctx.columns :] = 0
        return found, None
