"""The repeated part of a decoder-only transformer: attention and MLP with their norms.

Shapes: B sequences, T tokens, C features, H query heads and G key-value heads of D = C / H features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.kv_cache import KVCache

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of x (B, heads, T, D) by the angles of `table` ([B,] 1, T, D)."""
    sin, cos = table.chunk(2, dim=-1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def attention_mask(start: int, end: int, document_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns which of the keys [0, end) each query in [start, end) attends to, as booleans ([B, 1,] T, end).

    Returns None in the two cases that need no mask: as many keys as queries, or a single query.
    """
    if document_ids is None and (start == 0 or end - start == 1):
        return None
    mask = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return mask


class Attention(nn.Module):
    """Causal self-attention; where G < H, every key-value head serves H / G query heads."""

    def __init__(self, n_embd: int, n_head: int, n_kv_head: int, bias: bool, dropout: float):
        super().__init__()
        self.head_dim, self.dropout = n_embd // n_head, dropout
        self.attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.q_proj = nn.Linear(n_embd, n_embd, bias)
        self.k_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.v_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias)
        self.o_proj = nn.Linear(n_embd, n_embd, bias)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C), with rotary positions, mask and cache where they are not None."""
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # -1: under tensor parallelism a projection only has the heads of this rank.
        q, k, v = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        # Without a cache a constant: with dynamic shapes the compiler would not treat the comparison as one.
        causal = mask is None and (cache is None or q.shape[2] == k.shape[2])
        dropout, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        y = self.attend(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections with an activation between; "swiglu" adds a gate: down(silu(gate(x)) * up(x))."""

    def __init__(self, n_embd: int, intermediate_size: int, activation: str, bias: bool):
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS.get(activation, F.silu)
        self.gate_proj = nn.Linear(n_embd, intermediate_size, bias) if activation == "swiglu" else None
        self.up_proj = nn.Linear(n_embd, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, n_embd, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., C) to (..., C)."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then MLP: x + f(norm(x)) for each with norms first, norm(x + f(x)) with norms last."""

    def __init__(self, attention: Attention, mlp: MLP, norms: list[nn.Module], pre: bool, dropout: float):
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.pre_norm = attention, mlp, pre
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C); the other arguments go to the attention."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask, cache))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, rope, mask, cache)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))
