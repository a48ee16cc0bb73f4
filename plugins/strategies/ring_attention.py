"""Causal attention over tokens that are sharded over ranks; keys and values are passed around a ring.

Exact, as in Ring Attention (arXiv:2310.01889): outputs of blocks are merged by their log-sum-exps, and no scores are
written out, so that a rank needs memory for its own tokens and for those that arrive. Each rank has a chunk from
the head and one from the tail of a sequence, which balances the work (Striped Attention, arXiv:2311.09431, balances it in
another way): all blocks but the first have half the queries or half the keys. While a block is computed, the next keys
and values arrive, and in backward the gradients of the last ones, too.

Shapes: as in `context_parallel`; a chunk has c = t / 2 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.strategies.ring_kernels import Block, Kernel, kernel_for
from toolkit.fused_masks import as_autocast


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, for one batch.

    Attributes:
        documents: Document of each token, (B, T); None: one document per row.
        kernel: What computes blocks; None: what `kernel_for` finds.
    """

    group: dist.ProcessGroup
    documents: Tensor | None = None
    kernel: Kernel | None = None
    _blocks: dict[int, Block] = field(default_factory=dict, init=False)

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

    def block(self, step: int, q: Tensor) -> Block:
        """Returns what queries (B, H, t, D) of this rank see of the keys that came `step` ranks; layers share it."""
        if step not in self._blocks:
            source, tokens = (self.rank - step) % self.ranks, q.shape[2]
            rows = slice(tokens // 2 if source > self.rank else 0, tokens)
            columns = slice(0, tokens // 2 if source < self.rank else tokens)
            documents = None
            if self.documents is not None:
                documents = self._own(self.rank)[:, rows], self._own(source)[:, columns]
            self._blocks[step] = Block(rows, columns, source == self.rank, q.device, documents)
        return self._blocks[step]

    def _own(self, rank: int) -> Tensor:
        """Returns the documents (B, t) of a rank's tokens."""
        assert self.documents is not None
        chunks = self.documents.chunk(2 * self.ranks, dim=1)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Returns causal attention (B, H, t, D) of q (B, H, t, D) to k and v (B, G, t, D) of all ranks."""
    out: Tensor = _RingAttention.apply(*as_autocast(q, k, v), ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            kernel = ring.kernel or kernel_for(q, k, v, ring.documents is not None)
            kv = torch.stack((k, v))
            for step in range(ring.ranks):
                arriving, works = ring.start(kv) if step + 1 < ring.ranks else (kv, [])
                block = ring.block(step, q)
                keys, values = kv[..., block.columns, :]
                found = kernel.attend(q[:, :, block.rows], keys, values, block)
                if step == 0:
                    out, lse = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in found)
                else:
                    _merge(out[:, :, block.rows], lse[:, :, block.rows], *found)
                _wait(works)
                kv = arriving
            out = out.to(q.dtype)
        ctx.ring, ctx.kernel = ring, kernel
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        works: list[Any] = []
        with torch.autocast(q.device.type, enabled=False):
            kv = torch.stack((k, v))
            d_queries = torch.zeros_like(q, dtype=lse.dtype)
            sums = torch.zeros_like(
                kv, dtype=lse.dtype
            )  # gradients of keys and values, which travel with them
            for step in range(ring.ranks):
                arriving, coming = ring.start(kv) if step + 1 < ring.ranks else (kv, [])
                block = ring.block(step, q)
                own = q[:, :, block.rows], *kv[..., block.columns, :]
                whole = out[:, :, block.rows], lse[:, :, block.rows]
                found = ctx.kernel.gradients(gradient[:, :, block.rows], *own, *whole, block)
                d_queries[:, :, block.rows] += found[0]
                _wait(works)  # for what the ranks before this one have added
                sums[0, :, :, block.columns] += found[1]
                sums[1, :, :, block.columns] += found[2]
                sums, works = ring.start(sums)
                _wait(coming)
                kv = arriving
            _wait(works)
        return d_queries.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds the attention to further keys, (B, H, T, D) with log-sum-exps (B, H, T), in place.

    No log-sum-exp of `lse` is -inf: each query sees itself, in the first block.
    """
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(more * (more_lse - total).exp_()[..., None])
    lse.copy_(total)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
