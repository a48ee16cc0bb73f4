"""Attention of one block of a ring with its log-sum-exp, and its gradients: torch's kernels, which write out no scores.

Shapes: a block has T queries (B, H, T, D), and S keys and values (B, G, S, D).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.fused_masks import fused_attention, fused_mask

TILE = 256
"""Queries whose mask is written out at a time on a CPU."""

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """A block of attention.

    Attributes:
        rows: Its queries among the tokens of this rank.
        columns: Its keys among those of the rank that they came from.
        causal: Whether query t sees keys 0 to t alone; then T is S. Otherwise it sees all.
        device: Of the tensors.
        documents: That of each query, (B, T), and of each key, (B, S): those that differ do not see each other.
    """

    rows: slice
    columns: slice
    causal: bool
    device: torch.device
    documents: tuple[Tensor, Tensor] | None

    @cached_property
    def mask(self) -> Any:
        """FlexAttention's; None where every query sees every key."""
        if not self.causal and self.documents is None:
            return None
        queries, keys = (part.stop - part.start for part in (self.rows, self.columns))
        return fused_mask(queries, keys, self.device, self.documents, self.causal)


class Kernel(Protocol):
    """Computes blocks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Returns the output (B, H, T, D), and log-sum-exps (B, H, T): -inf for a query that sees nothing."""

    def gradients(
        self, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Gradients:
        """Returns those of q, k and v, given output and log-sum-exps of these queries over all blocks."""


def kernel_for(q: Tensor, k: Tensor, v: Tensor, documents: bool) -> Kernel:
    """Returns what computes blocks: on CUDA flash attention where it can, which takes no documents, else FlexAttention."""
    if q.device.type == "cpu":
        return CPUKernel()
    if not documents and q.is_cuda and q.shape[-1] % 8 == 0:
        call = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
        if torch.backends.cuda.can_use_flash_attention(call):
            return FlashKernel()
    return RecomputingKernel()


class CPUKernel:
    """torch's flash attention for CPUs; with documents some queries at a time, and the keys that they see."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if block.documents is None:
            found: tuple[Tensor, Tensor] = attend(q, k, v, 0.0, block.causal)
            return found
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, columns, seen in _tiles(block):
            some = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            out[:, :, rows], sums = attend(*some, 0.0, False, attn_mask=_bias(seen, q.dtype))
            lse[:, :, rows] = sums.masked_fill(~seen.any(-1), -math.inf)  # torch has 0 there
        return out, lse

    def gradients(
        self, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Gradients:
        """See :class:`Kernel`."""
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        if block.documents is None:
            found: Gradients = backward(upstream, q, k, v, out, lse, 0.0, block.causal)
            return found
        sums = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows, columns, seen in _tiles(block):
            some = q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows]
            bias = _bias(seen, q.dtype)
            parts = backward(upstream[:, :, rows], *some, 0.0, False, attn_mask=bias)
            for total, part, places in zip(sums, parts, (rows, columns, columns), strict=True):
                total[:, :, places] += part
        return sums[0], sums[1], sums[2]


def _tiles(block: Block) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields queries, the keys from the first to the last that one of them sees, and which each sees, (B, 1, T, S)."""
    assert block.documents is not None
    queries, keys = block.documents
    for start in range(0, queries.shape[1], TILE):
        rows = slice(start, min(start + TILE, queries.shape[1]))
        seen = queries[:, None, rows, None] == keys[:, None, None, : rows.stop if block.causal else None]
        if block.causal:
            seen = seen.tril(start)
        some = seen.flatten(0, 2).any(0).nonzero()
        if len(some):
            columns = slice(int(some[0]), int(some[-1]) + 1)
            yield rows, columns, seen[..., columns]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


class FlashKernel:
    """torch's flash attention for CUDA, without documents."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        attend: Any = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, _, _, _, _, *self._random, _ = attend(q, k, v, 0.0, block.causal, False)
        return out, lse

    def gradients(
        self, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Gradients:
        """See :class:`Kernel`; after a call of `attend`, whose state of random numbers no dropout reads."""
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        sizes = None, None, q.shape[2], k.shape[2]
        found: Gradients = backward(upstream, q, k, v, out, lse, *sizes, 0.0, block.causal, *self._random)
        return found


class RecomputingKernel:
    """FlexAttention, which is computed again for gradients: its own take no log-sum-exps of other blocks.

    With w = exp(l - L) for a block's output o and log-sum-exp l, and O and L over all blocks, the gradient of o is w dO,
    and that of l is w dO (o - O).
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        found: tuple[Tensor, Tensor] = fused_attention(q, k, v, block.mask, with_lse=True)
        return found

    def gradients(
        self, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Gradients:
        """See :class:`Kernel`."""
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            own, own_lse = fused_attention(q, k, v, block.mask, with_lse=True)
        share = (own_lse.detach() - lse).exp()
        above = upstream * share[..., None]
        of_lse = (above * (own.detach() - out)).sum(-1)
        d_q, d_k, d_v = torch.autograd.grad((own, own_lse), (q, k, v), (above.to(own.dtype), of_lse))
        return d_q, d_k, d_v
