"""Context parallelism: sequences sharded over ranks, and attention across the shards.

Shapes: B sequences of T tokens, t of them on a rank; H query heads, G key-value heads, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError
from plugins.strategies.ring_attention import Ring, ring_attention
from toolkit.fused_masks import fused_mask, masked_attention, takes_fused_masks

Method = Literal["ring", "ulysses"]


class ContextParallel:
    """Shards the tokens of a batch, and attends to those of other ranks.

    "ring": rank r of n has the r-th and the r-th last of 2n chunks, so that all ranks have the same amount of
    attention; keys and values are passed around a ring. "ulysses" (arXiv:2309.14509): ranks have chunks in order;
    an all-to-all exchanges tokens for heads before attention and back after it.

    Args:
        group: The ranks that share each sequence.
        method: How attention reaches the tokens of other ranks.

    Attributes:
        documents: Document of each token of the batch, (B, T); None: one document per row.
    """

    def __init__(self, group: dist.ProcessGroup, method: Method) -> None:
        self.group, self.method = group, method
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.documents: Tensor | None = None
        self._ring, self._mask = Ring(group), None

    def install(self, network: Network) -> None:
        """Makes a network use this attention."""
        network.replace_attention(self.attend)

    def shard(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's tokens (B, t) of each tensor (B, T), with their positions.

        Raises:
            ConfigError: If T is not a multiple of the number of chunks.
        """
        rows, length = batch["input_ids"].shape
        cuts = pieces(self.ranks, self.method)
        if length % cuts:
            raise ConfigError(
                f"HybridParallel: context is {self.ranks}; {self.method} takes sequences of a multiple of {cuts} "
                f"tokens, not {length}."
            )
        own = self._tokens_of(self.rank, length, batch["input_ids"].device)
        self.documents = batch.get("document_ids")
        self._ring, self._mask = Ring(self.group, self.documents), self._document_mask()
        parts = {name: value[:, own] for name, value in batch.items() if name != "document_ids"}
        return {"position_ids": own.expand(rows, -1)} | parts

    def _tokens_of(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Returns the places of a rank's tokens in rows of this length, (t,)."""
        chunks = torch.arange(length, device=device).chunk(pieces(self.ranks, self.method))
        if self.method == "ring":
            return torch.cat((chunks[rank], chunks[-1 - rank]))
        return chunks[rank]

    def joined(self, own: Tensor, dim: int = 1) -> Tensor:
        """Returns the values of all tokens of each row, given those of this rank's, without gradients; called on every rank.

        Args:
            own: With t tokens in a dimension.
            dim: This dimension.
        """
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, own.detach().contiguous(), group=self.group)
        length = self.ranks * own.shape[dim]
        places = [self._tokens_of(rank, length, own.device) for rank in range(self.ranks)]
        return torch.cat(parts, dim).index_select(dim, torch.cat(places).argsort())

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attends from q (B, H, t, D) to k and v (B, G, t, D) of all ranks; called as torch's attention.

        Raises:
            ConfigError: If attention is not causal, or has dropout.
        """
        if mask is not None or not is_causal or dropout:
            raise ConfigError("HybridParallel: context above 1 takes causal attention without dropout.")
        if self.method == "ring":
            return ring_attention(q, k, v, self._ring)
        q, k, v = (_heads_for_tokens(x, self.group) for x in (q, k, v))
        mask = self._mask
        y = masked_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=enable_gqa)
        return _tokens_for_heads(y, self.group)

    def _document_mask(self) -> Any:
        """Returns which tokens see each other, for `ulysses`, once for all layers; None: all before."""
        ids = self.documents
        if ids is None or self.method == "ring":
            return None
        if takes_fused_masks(ids.device, ids.shape[1]):
            return fused_mask(ids.shape[1], ids.shape[1], ids.device, (ids, ids))
        return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


def pieces(size: int, method: Method) -> int:
    """Returns the number of chunks of a sequence: two per rank for `ring`, one for `ulysses`."""
    return size * (2 if method == "ring" else 1)


def compatibility_errors(
    network: Network, size: int, tensor: int, method: Method, length: int | None
) -> Iterator[str]:
    """Yields why sequences of a network cannot be sharded over `size` ranks."""
    name, cuts = type(network).__name__, pieces(size, method)
    if not network.replace_attention(F.scaled_dot_product_attention):
        yield f"{name} does not let its attention be replaced: set context to 1"
    if length and length % cuts:
        fits = length + -length % cuts
        yield (
            f"context is {size}; {method} takes a multiple of {cuts} tokens, and data.sequence_length is {length}: "
            f"set it to {fits}"
        )
    heads = network.attention_heads
    if method == "ulysses" and heads and (odd := next((n for n in heads if n % (size * tensor)), None)):
        yield f"context {size} x tensor {tensor} does not divide the {odd} attention heads of {name}: take ring"


class _Exchange(torch.autograd.Function):
    """All-to-all: sends slice i of the first dimension to rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        back = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(back, gradient.contiguous(), group=ctx.group)
        return back, None


def _heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H, t, D) of all heads and some tokens -> (B, H / n, T, D) of some heads and all tokens."""
    parts = torch.stack(x.chunk(group.size(), dim=1)).contiguous()  # (n, B, H / n, t, D)
    return _Exchange.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H / n, T, D) of some heads and all tokens -> (B, H, t, D) of all heads and some tokens."""
    parts = torch.stack(x.chunk(group.size(), dim=2)).contiguous()  # (n, B, H / n, t, D)
    return _Exchange.apply(parts, group).permute(1, 0, 2, 3, 4).flatten(1, 2)
