"""Attention of decoders and encoders, and which tokens it sees.

Shapes: B sequences, T tokens, C features, H query heads and G key-value heads of D features each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.parts.kv_cache import KVCache, SlidingKVCache
from plugins.networks.parts.norms import soft_cap
from plugins.networks.parts.positions import rotate
from toolkit.fused_masks import fused_attention, fused_mask, masked_attention

Cache = KVCache | SlidingKVCache


def attention_mask(
    start: int,
    end: int,
    document_ids: Tensor | None,
    device: torch.device,
    window: int | None = None,
    visible: Tensor | None = None,
    prefix: Tensor | None = None,
    fused: bool = False,
) -> Any:
    """Returns which of the keys [first, end) each query in [start, end) attends to, as booleans ([B, 1,] T, keys).

    Returns None where no mask is needed: with as many keys as queries, or a single query.

    Args:
        start: Tokens in the cache.
        end: Tokens in the cache, and new ones.
        document_ids: As in :class:`core.contracts.Batch`.
        device: Of the mask.
        window: How many tokens a query sees, itself included; None: all before it. With a window the first
            key is that of token max(0, start - window + 1), as in `SlidingKVCache`; without one it is token 0.
        visible: Which tokens are no padding in front of a row, (B, tokens); None: all. Padding sees itself.
        prefix: Which tokens see each other in both directions, (B, T), without a cache; None: none do.
        fused: Whether FlexAttention's mask is returned, where there is neither cache nor padding nor prefix.
    """
    within = window is None or end <= window
    first = 0 if window is None else max(0, start - window + 1)
    if (
        document_ids is None
        and prefix is None
        and (end - start == 1 or (start == 0 and within and visible is None))
    ):
        return None if visible is None else visible[:, None, None, first:end]
    if fused and prefix is None and visible is None:
        documents = None if document_ids is None else (document_ids, document_ids)
        return fused_mask(end, end, device, documents, window=None if within else window)
    mask = torch.ones(end - start, end - first, dtype=torch.bool, device=device).tril(start - first)
    if window is not None and not within:
        mask = mask.triu(start - first - window + 1)
    if prefix is not None:
        mask = mask | prefix[:, None, :, None] & prefix[:, None, None, :]
    if document_ids is not None:
        mask = mask & document_mask(document_ids, document_ids)
    if visible is not None:
        itself = mask.triu(start - first)
        mask = mask & visible[:, None, None, first:end] | itself  # a query without a key gives NaN
    return mask


def document_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns which keys are of the document of each query, (B, 1, queries, keys), given their `document_ids`."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    *,
    cap: float,
) -> Tensor:
    """Attends as `F.scaled_dot_product_attention`, with scores kept within (-cap, cap); as in Gemma 2, arXiv:2408.00118.

    With a mask of FlexAttention it is that; else written out, with all scores (B, H, T, T) in memory.
    """
    if mask is not None and not isinstance(mask, Tensor):
        found: Tensor = fused_attention(q, k, v, mask, scale, cap)
        return found
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = soft_cap(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale), cap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


class Attention(nn.Module):
    """Self-attention, or attention to another sequence; where G < H, every key-value head serves H / G query heads.

    Args:
        n_embd: Width C.
        n_head: H.
        n_kv_head: G.
        bias: Whether the projections to queries, keys and values have biases.
        dropout: Of the attention weights.
        head_dim: D; None: C / H.
        output_bias: Whether the output projection has one; None: as `bias`.
        qk_norm: What queries and keys are normalised over before they are rotated: "head", the D features of each,
            as in Qwen 3; "all", those of all heads together, as in OLMo 2. None: nothing.
        new_norm: Returns these norms, given their size.
        query_scale: Scores are queries times keys times this; None: D^-0.5.
        soft_cap: Scores are kept within this; None: not at all.
        causal: Whether a token sees those before it alone, where there is no mask.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_kv_head: int,
        bias: bool,
        dropout: float,
        *,
        head_dim: int | None = None,
        output_bias: bool | None = None,
        qk_norm: Literal["head", "all"] | None = None,
        new_norm: Callable[[int], nn.Module] = nn.RMSNorm,
        query_scale: float | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
    ):
        super().__init__()
        self.causal = causal
        self.head_dim, self.dropout, self.qk_norm = head_dim or n_embd // n_head, dropout, qk_norm
        self.query_scale, self.soft_cap = query_scale, soft_cap
        self.attend: Callable[..., Tensor] = (
            partial(capped_attention, cap=soft_cap) if soft_cap else masked_attention
        )
        self.q_proj = nn.Linear(n_embd, n_head * self.head_dim, bias)
        self.k_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.v_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.o_proj = nn.Linear(n_head * self.head_dim, n_embd, bias if output_bias is None else output_bias)
        if qk_norm is not None:
            heads = (n_head, n_kv_head) if qk_norm == "all" else (1, 1)
            self.q_norm, self.k_norm = (new_norm(number * self.head_dim) for number in heads)

    @property
    def is_plain(self) -> bool:
        """Whether `attend` may be any function for causal attention without a mask, a scale of its own or a cap."""
        return self.causal and self.query_scale is None and self.soft_cap is None

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        mask: Any,
        cache: Cache | None,
        source: Tensor | None = None,
    ) -> Tensor:
        """Maps x (B, T, C) to (B, T, C), with rotary positions, mask and cache where they are not None.

        Args:
            x: What queries are made of.
            rope: Sines and cosines.
            mask: Which keys a query sees, as booleans or FlexAttention's, or numbers to add to the scores.
            cache: Keys and values of earlier tokens.
            source: What keys and values are made of, (B, S, C); None: x.
        """
        seen = x if source is None else source
        q, k, v = self.q_proj(x), self.k_proj(seen), self.v_proj(seen)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        # -1: under tensor parallelism a projection only has the heads of this rank.
        q, k, v = (y.unflatten(2, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        # Without a cache a constant: with dynamic shapes the compiler would not treat the comparison as one.
        causal = self.causal and mask is None and (cache is None or q.shape[2] == k.shape[2])
        dropout, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        scale = {} if self.query_scale is None else {"scale": self.query_scale}
        y = self.attend(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped, **scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))
