"""Causal attention over tokens that are sharded over ranks; keys and values are passed around a ring.

Blockwise and exact, as in Ring Attention (arXiv:2310.01889). Each rank has a chunk from the head and one from the tail
of a sequence, which balances the work (Striped Attention, arXiv:2311.09431, balances it in another way). Written as
matrix products of one chunk by one chunk, the same on CPU and GPU; only one such block is kept.

Shapes: as in `context_parallel`; a chunk has c = t / 2 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring.

    Attributes:
        documents: Document of each token, (B, T); None: one document per row.
    """

    group: dist.ProcessGroup
    documents: Tensor | None = None

    @property
    def ranks(self) -> int:
        """The number n of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The index of this rank."""
        return dist.get_rank(self.group)

    def start(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Starts to send a tensor to the next rank; returns the buffer for that of the previous rank, and the works."""
        arriving = torch.empty_like(tensor)
        ranks = dist.get_process_group_ranks(self.group)
        after, before = ranks[(self.rank + 1) % self.ranks], ranks[self.rank - 1]
        operations = [
            dist.P2POp(dist.isend, tensor, after, self.group),
            dist.P2POp(dist.irecv, arriving, before, self.group),
        ]
        return arriving, dist.batch_isend_irecv(operations)

    def blocks(self, source: int, size: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yields the blocks of attention: rows of this rank, columns of another, and a mask if not all are seen.

        Args:
            source: The rank of keys and values.
            size: Tokens per chunk.
        """
        mine, theirs = ((rank, 2 * self.ranks - 1 - rank) for rank in (self.rank, source))
        for i, to in enumerate(mine):
            for j, of in enumerate(theirs):
                if of <= to:
                    rows, columns = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                    yield rows, columns, self._mask(to, of, size)

    def _mask(self, to: int, of: int, size: int) -> Tensor | None:
        mask = None
        if self.documents is not None:
            queries, keys = (self.documents[:, chunk * size : (chunk + 1) * size] for chunk in (to, of))
            mask = (queries[:, :, None] == keys[:, None, :])[:, None, None]  # (B, 1, 1, c, c)
        if to == of:
            seen = torch.ones(size, size, dtype=torch.bool, device=self._device()).tril()
            mask = seen if mask is None else mask & seen
        return mask

    def _device(self) -> Any:
        return None if self.documents is None else self.documents.device


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Returns causal attention (B, H, t, D) of q (B, H, t, D) to k and v (B, G, t, D) of all ranks."""
    out: Tensor = _RingAttention.apply(q, k, v, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        with torch.autocast(q.device.type, enabled=False), torch.device(q.device):
            queries, kv = _grouped(q, k.shape[1]), torch.stack((k, v)).contiguous()
            out = torch.zeros_like(queries)
            lse = torch.full(queries.shape[:-1], -math.inf)
            for step in range(ring.ranks):
                arriving, waits = ring.start(kv) if step + 1 < ring.ranks else (kv, [])
                source = (ring.rank - step) % ring.ranks
                for rows, columns, mask in ring.blocks(source, q.shape[2] // 2):
                    keys, values = (x[:, :, None, columns].float() for x in kv)
                    scores = _scores(queries[..., rows, :], keys, mask)
                    block = scores.logsumexp(-1)
                    total = torch.logaddexp(lse[..., rows], block)
                    keep = _exp(lse[..., rows] - total)
                    weights = _exp(scores - total[..., None])
                    out[..., rows, :] = out[..., rows, :] * keep[..., None] + weights @ values
                    lse[..., rows] = total
                for wait in waits:
                    wait.wait()
                kv = arriving
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        with torch.autocast(q.device.type, enabled=False), torch.device(q.device):
            queries, upstream = _grouped(q, k.shape[1]), _grouped(gradient, k.shape[1])
            scale, delta = q.shape[-1] ** -0.5, (upstream * out).sum(-1, keepdim=True)
            d_queries = torch.zeros_like(queries)
            travelling = torch.stack((k, v)).float()
            travelling = torch.cat((travelling, torch.zeros_like(travelling)))  # k, v and their gradients
            for step in range(ring.ranks):
                keys, values, d_keys, d_values = travelling
                for rows, columns, mask in ring.blocks((ring.rank - step) % ring.ranks, q.shape[2] // 2):
                    one, other = keys[:, :, None, columns], values[:, :, None, columns]
                    weights = _exp(_scores(queries[..., rows, :], one, mask) - lse[..., rows, None])
                    above = upstream[..., rows, :]
                    d_values[:, :, columns] += (weights.mT @ above).sum(2)
                    d_scores = weights * (above @ other.mT - delta[..., rows, :]) * scale
                    d_queries[..., rows, :] += d_scores @ one
                    d_keys[:, :, columns] += (d_scores.mT @ queries[..., rows, :]).sum(2)
                arriving, waits = ring.start(travelling)
                for wait in waits:
                    wait.wait()
                travelling = arriving
            d_keys, d_values = travelling[2:]
        return d_queries.flatten(1, 2).to(q.dtype), d_keys.to(k.dtype), d_values.to(v.dtype), None


def _grouped(x: Tensor, heads: int) -> Tensor:
    """(B, H, t, D) -> (B, G, H / G, t, D) in float32."""
    return x.unflatten(1, (heads, -1)).float()


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _exp(x: Tensor) -> Tensor:
    """exp, and 0 for the difference of two infinities: a block in which a query attends to nothing."""
    return x.exp().nan_to_num(nan=0.0)
