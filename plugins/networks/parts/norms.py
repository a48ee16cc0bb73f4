"""Norms over the last dimension."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NormKind = Literal["layernorm", "rmsnorm", "gemma"]


class GemmaRMSNorm(nn.RMSNorm):
    """RMSNorm times (1 + weight), computed in float32; the weight begins at zero. As in Gemma, arXiv:2403.08295."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps)

    def reset_parameters(self) -> None:
        """Sets the weight to zero: the norm begins as a plain one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., dim) of the same data type."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


def new_norm(kind: NormKind, dim: int, eps: float, bias: bool = True) -> nn.Module:
    """Returns a norm of `dim` features; `bias` is that of a layer norm."""
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps, bias=bias)
    return nn.RMSNorm(dim, eps) if kind == "rmsnorm" else GemmaRMSNorm(dim, eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Keeps values within (-cap, cap): cap * tanh(x / cap), as in Gemma 2, arXiv:2408.00118, section 2."""
    return torch.tanh(x / cap) * cap
