"""What attention computes and no fused kernel returns: its logits and the entropy of its weights, for some queries.

Shapes: B sequences, T queries, S keys, H query heads and G key-value heads of D features each; L blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.training.shards import local_tensors

__all__ = ["AttendsThroughFunction", "add_statistics", "listen_to", "spaced"]

MOST = 2**24
"""Logits, 64 MiB of them, that are computed at once; those of one query and all heads always are."""


@runtime_checkable
class AttendsThroughFunction(Protocol):
    """A module whose attention is one call of a function that can be replaced.

    Attributes:
        attend: Called as `F.scaled_dot_product_attention` is.
        soft_cap: Within what `attend` keeps the logits, cap tanh(logit / cap); None: it does not.
    """

    attend: Callable[..., Tensor]
    soft_cap: float | None


class _Replaced:
    def __init__(self, module: Any, plain: Callable[..., Tensor]) -> None:
        self.module, self.plain = module, plain
        # a hook, too: who has compiled the module sees by it that somebody listens
        self.hook = module.register_forward_pre_hook(lambda module, inputs: None)

    def remove(self) -> None:
        self.hook.remove()
        self.module.attend = self.plain


def listen_to(
    module: AttendsThroughFunction, heard: Callable[[Tensor, Tensor, Any, bool, float], None]
) -> Any:
    """Calls `heard(q, k, mask, is_causal, scale)` before each call of a module's `attend`; returns what undoes it."""
    plain = module.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        mask = rest[0] if rest else options.get("attn_mask")
        scale = options.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        heard(q, k, mask, bool(options.get("is_causal")), scale)
        return plain(q, k, v, *rest, **options)

    module.attend = attend
    return _Replaced(module, plain)


def spaced(length: int, number: int) -> slice:
    """Returns about so many of a row's positions, evenly spaced; the last one of as many others each."""
    step = max(length // number, 1)
    return slice(step - 1, None, step)


@torch.no_grad()
def add_statistics(
    sums: Tensor,
    largest: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Any,
    is_causal: bool,
    scale: float,
    cap: float | None,
    queries: int,
) -> None:
    """Adds those of about `queries` queries of each row and head, without waiting for the device.

    Args:
        sums: (2,), to add entropies (nats) and their number to.
        largest: 0-d, raised to the largest logit that a query has for a key that it sees.
        q: (B, H, T, D).
        k: (B, G, S, D).
        mask: Which keys a query sees, or what is added to its logits, (..., T, S); FlexAttention's mask; or None.
        is_causal: Whether a query sees the keys up to its own place alone.
        scale: What products are multiplied with.
        cap: See `AttendsThroughFunction`.
        queries: How many; all where there are fewer.
    """
    q, k = local_tensors((q, k))
    wide = torch.promote_types(q.dtype, torch.float32)
    some, keys = range(q.shape[2])[spaced(q.shape[2], queries)], torch.arange(k.shape[2], device=q.device)
    at_once = max(MOST // (q.shape[1] * len(keys)), 1)
    for row in range(len(q)):
        row_k = k[row].to(wide)
        for begin in range(0, len(some), at_once):
            part = some[begin : begin + at_once]
            chosen = slice(part.start, part.stop, part.step)
            logits = _logits(q[row, :, chosen].to(wide), row_k) * scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            places = torch.arange(part.start, part.stop, part.step, device=q.device)
            if is_causal:
                logits = logits.masked_fill(keys > places[:, None], -torch.inf)
            logits = _masked(logits, mask, row, chosen, places, keys)
            log_weights = logits.log_softmax(-1)
            terms = log_weights.exp() * log_weights.masked_fill(log_weights == -torch.inf, 0)
            sums[0] -= terms.sum(dtype=sums.dtype)
            sums[1] += terms[..., 0].numel()
            torch.maximum(largest, logits.max(), out=largest)


def _logits(q: Tensor, k: Tensor) -> Tensor:
    """Returns the products (H, T, S) of queries (H, T, D) and keys (G, S, D), without a copy of the keys for each head."""
    heads, length, size = q.shape
    return (q.reshape(len(k), -1, size) @ k.mT).view(heads, length, -1)


def _masked(logits: Tensor, mask: Any, row: int, some: slice, places: Tensor, keys: Tensor) -> Tensor:
    if mask is None:
        return logits
    if hasattr(mask, "mask_mod"):  # a BlockMask of FlexAttention
        heads = torch.arange(len(logits), device=logits.device)[:, None, None]
        at = torch.tensor(row, device=logits.device)
        return logits.masked_fill(~mask.mask_mod(at, heads, places[:, None], keys), -torch.inf)
    [mask] = local_tensors([mask])
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    own = mask[row if len(mask) > 1 else 0][:, some]
    return logits.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else logits + own
