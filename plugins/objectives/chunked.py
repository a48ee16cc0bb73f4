"""A loss whose logits are computed for one chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = Callable[[Tensor, Tensor], Tensor]
"""(logits (n, V), labels (n,)) -> sums (P,); the first one is differentiated."""


def in_chunks(parts: Parts, hidden: Tensor, weight: Tensor, labels: Tensor, size: int) -> Tensor:
    """Returns `parts(hidden @ weight.T, labels)` without holding all logits in memory.

    Args:
        parts: Computes sums over positions.
        hidden: Hidden states, (N, C).
        weight: Output weight, (V, C).
        labels: Labels, (N,).
        size: Positions per chunk.
    """
    return _Chunks.apply(hidden, weight, parts, labels, size)


class _Chunks(torch.autograd.Function):
    """Computes the gradient of each chunk in forward, while its logits exist; backward only scales it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, parts: Parts, labels: Tensor, size: int) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        # Gradients are summed over many chunks: at least in float32.
        wide = torch.promote_types(weight.dtype, torch.float32)
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        sums: Tensor | None = None
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            with torch.set_grad_enabled(any(wanted)):
                inputs = [
                    hidden[rows].detach().requires_grad_(wanted[0]),
                    weight.detach().requires_grad_(wanted[1]),
                ]
                found = parts(F.linear(*inputs), labels[rows])
                loss = found[0]
            if any(wanted):
                differentiated = [value for value in inputs if value.requires_grad]
                gradients = list(torch.autograd.grad(loss, differentiated))
                if by_weight is not None:
                    by_weight += gradients.pop()
                if by_hidden is not None:
                    by_hidden[rows] = gradients.pop()
            sums = found.detach() if sums is None else sums + found.detach()
        ctx.save_for_backward(by_hidden, by_weight)
        ctx.dtype = weight.dtype
        return torch.zeros(3, device=hidden.device) if sums is None else sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        scale = outputs[0][0]
        scaled = (
            (None if by_hidden is None else by_hidden * scale.to(by_hidden.dtype)),
            (None if by_weight is None else (by_weight * scale).to(ctx.dtype)),
        )
        return *scaled, None, None, None
