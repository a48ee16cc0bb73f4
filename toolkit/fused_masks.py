"""Masks of attention that are never written out: FlexAttention's, of documents and windows, and attention with them.

Shapes: B sequences, T queries, S keys, H query heads and G key-value heads of D features each. Blocks are of 128 by 128.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["as_autocast", "fused_attention", "fused_mask", "masked_attention", "takes_fused_masks"]

BLOCK = 128
MOST_KERNELS = 64
NARROWEST = 16
"""Features of a head that FlexAttention takes at least; fewer are padded."""


def takes_fused_masks(device: torch.device, queries: int) -> bool:
    """Returns whether attention of T queries, without dropout, has a mask of `fused_mask`, and not one of booleans.

    On CUDA from one block on: there booleans (B, 1, T, T) exclude flash attention. On a CPU FlexAttention has no gradients.
    """
    return device.type == "cuda" and queries >= BLOCK


def fused_mask(
    queries: int,
    keys: int,
    device: torch.device,
    documents: tuple[Tensor, Tensor] | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Any:
    """Returns FlexAttention's mask: which keys each query sees.

    Blocks that nobody sees are skipped, and those that are seen in full are computed without the mask. Which these are
    follows from the smallest and the largest document of each block: nothing (B, T, S) is made, and the host waits
    for nothing. It is right for documents in any order, and skips most where they rise along the row.

    Args:
        queries: T.
        keys: S.
        device: Of the mask.
        documents: That of each query, (B, T), and of each key, (B, S): those that differ do not see each other.
        causal: Whether query t sees keys 0 to t alone.
        window: With `causal`, how many keys a query sees, that of its own place included; None: all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = (torch.arange(-(-length // BLOCK), device=device) for length in (queries, keys))
    first_query, first_key = rows[:, None] * BLOCK, columns * BLOCK
    last_query, last_key = first_query + BLOCK - 1, first_key + BLOCK - 1
    whole = (last_query < queries) & (last_key < keys)
    some, full = torch.ones_like(whole), whole
    if causal:
        some, full = some & (first_key <= last_query), full & (last_key <= first_query)
    if window is not None:
        some, full = some & (first_query - last_key < window), full & (last_query - first_key < window)
    some, full = some[None], full[None]
    query_ids, key_ids = documents or (None, None)
    if query_ids is not None and key_ids is not None:
        low, high = (ids[:, :, None] for ids in _ranges(query_ids))
        lower, higher = (ids[:, None] for ids in _ranges(key_ids))
        some = some & (low <= higher) & (lower <= high)
        full = full & (low == high) & (lower == higher) & (low == lower)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key if causal else key >= 0
        if window is not None:
            seen = seen & (query - key < window)
        if query_ids is not None and key_ids is not None:
            seen = seen & (query_ids[row, query] == key_ids[row, key])
        return seen

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest id of each block, (B, blocks)."""
    missing = -ids.shape[1] % BLOCK
    ids = torch.cat((ids, ids[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, BLOCK))
    return ids.amin(-1), ids.amax(-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each block of queries how many blocks of keys there are, and which, then the others."""
    number = blocks.sum(-1, dtype=torch.int32)
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return number[:, None].contiguous(), places[:, None].contiguous()


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond the limit torch computes without a kernel, with all scores in memory. Each length, kind of mask, cap, and
    # forward with and without gradients counts; older versions have 8 and no argument.
    takes_limit = "recompile_limit" in signature(torch.compile).parameters
    options: Any = {"recompile_limit": MOST_KERNELS} if takes_limit else {}
    return torch.compile(flex_attention, **options)


def _capped(cap: float) -> Any:
    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors in the type that autocast has for `F.scaled_dot_product_attention`, which is not called here.

    Norms of queries and keys, which autocast computes in float32, would have the other kernels compute in float32, too.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float | None = None,
    cap: float | None = None,
    with_lse: bool = False,
) -> Any:
    """Attends from q (B, H, T, D) to k and v (B, G, S, D) where a mask of `fused_mask` lets it.

    FlexAttention has no float64, and on a CPU no gradients: there all scores are written out.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: None: every query sees every key.
        scale: Scores are queries times keys times this; None: D^-0.5.
        cap: Scores are kept within (-cap, cap), as in Gemma 2; None: they are not.
        with_lse: Whether the log-sum-exp of the scores, (B, H, T) in float32, is returned, too: -inf for a query that sees
            nothing, whose output is 0.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = as_autocast(q, k, v)
    if q.dtype == torch.float64 or q.device.type == "cpu":
        return _written_out(q, k, v, mask, scale, cap, with_lse)
    width, scale = v.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (pad(x, (0, max(NARROWEST - x.shape[-1], 0))) for x in (q, k, v))
    out, more = _compiled()(
        q,
        k,
        v,
        score_mod=None if cap is None else _capped(cap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=with_lse),
    )
    out = out[..., :width]
    return (out, more.lse) if with_lse else out


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, cap: float | None, with_lse: bool
) -> Any:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        places = (torch.arange(size, device=q.device) for size in (len(q), 1, *scores.shape[2:]))
        scores = scores.masked_fill(~mask.mask_mod(*torch.meshgrid(*places, indexing="ij")), -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp() @ v
    return (out, lse) if with_lse else out


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends as `F.scaled_dot_product_attention`, which it calls, or where the mask is of `fused_mask`, without dropout."""
    if attn_mask is None or isinstance(attn_mask, Tensor):
        options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **options)
    found: Tensor = fused_attention(q, k, v, attn_mask, scale)
    return found
