"""Multi-head latent attention: keys and values of all heads are projections of one small vector per token.

Shapes: B sequences, T new tokens, L tokens with those in the cache, C features, H heads, R = `kv_lora_rank` features of the
latent, N features of a head's query and key without position, P with it, V features of a head's value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.training.shards import local_tensors
from plugins.networks.parts.attention import Cache
from plugins.networks.parts.positions import rotate
from toolkit.fused_masks import masked_attention


class LatentAttention(nn.Module):
    """Causal self-attention as in DeepSeek-V2, arXiv:2405.04434, section 2.1, and DeepSeek-V3, arXiv:2412.19437.

    A cache holds the latent and the one rotated key that all heads share: R + P values a token, where keys and values would
    be H (N + P + V). A few new tokens are attended to in the absorbed form: queries are projected into the space of the
    latents, which then are keys and values of all heads alike, and no key or value of a head is computed.

    Args:
        n_embd: Width C.
        n_head: H.
        kv_lora_rank: R.
        q_lora_rank: Features of the latent that queries are projected from; None: of the hidden states themselves.
        nope_dim: N.
        rope_dim: P.
        value_dim: V.
        bias: Whether the projections to latents and the output projection have biases.
        dropout: Of the attention weights.
        scale: Scores are queries times keys times this.
        new_norm: Returns the norm of a latent, given its size.
    """

    is_plain = False
    """Values have another width than keys: `attend` cannot be any function for causal attention."""

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        bias: bool,
        dropout: float,
        scale: float,
        new_norm: Callable[[int], nn.Module],
    ):
        super().__init__()
        self.kv_lora_rank, self.nope_dim, self.rope_dim, self.value_dim = (
            kv_lora_rank,
            nope_dim,
            rope_dim,
            value_dim,
        )
        self.dropout, self.scale = dropout, scale
        width = n_head * (nope_dim + rope_dim)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(n_embd, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(n_embd, q_lora_rank, bias)
            self.q_a_norm = new_norm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, width, bias=False)
        self.kv_a_proj = nn.Linear(n_embd, kv_lora_rank + rope_dim, bias)
        self.kv_a_norm = new_norm(kv_lora_rank)
        self.kv_b_proj = nn.Linear(kv_lora_rank, n_head * (nope_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(n_head * value_dim, n_embd, bias)
        self.shared_key = nn.Identity()  # where tensor parallelism adds up the gradients of all heads
        self.q_lora_rank = q_lora_rank
        self.soft_cap: float | None = None
        self.attend: Callable[..., Tensor] = masked_attention

    def forward(self, x: Tensor, rope: Tensor, mask: Any, cache: Cache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C), with rotary positions, and mask and cache where they are not None."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        # -1: under tensor parallelism a projection only has the heads of this rank.
        q = q.unflatten(2, (-1, self.nope_dim + self.rope_dim)).transpose(1, 2)
        q, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        latent, key = self.kv_a_proj(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent, key = self.kv_a_norm(latent)[:, None], self.shared_key(key)[:, None]  # of one head
        q_rope, key = rotate(in_pairs(q_rope), rope), rotate(in_pairs(key), rope)
        if cache is not None:
            latent, key = cache.append(latent, key)
        options: dict[str, Any] = {
            "dropout_p": self.dropout if self.training else 0.0,
            # Without a cache a constant: with dynamic shapes the compiler would not treat the comparison as one.
            "is_causal": mask is None and (cache is None or q.shape[2] == key.shape[2]),
            "scale": self.scale,
        }
        attend = self._absorbed if cache is not None and self._absorbs(q.shape[2]) else self._expanded
        y: Tensor = attend(q, q_rope, latent, key, mask, options)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _absorbs(self, tokens: int) -> bool:
        """Whether so many new tokens cost fewer multiplications in the absorbed form, for each token in the cache."""
        if type(self.kv_b_proj) is not nn.Linear:  # its weight may be stored in another form
            return False
        width = self.nope_dim + self.value_dim
        return tokens * (2 * self.kv_lora_rank - width) < self.kv_lora_rank * width

    def _expanded(
        self,
        q: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        key: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """Returns (B, H, T, V) from keys and values of each head."""
        kv = self.kv_b_proj(latent[:, 0]).unflatten(2, (-1, self.nope_dim + self.value_dim)).transpose(1, 2)
        k, v = kv.split((self.nope_dim, self.value_dim), dim=-1)
        k = _joined(k, key.expand(-1, k.shape[1], -1, -1))
        return self.attend(_joined(q, q_rope), k, v, mask, **options)

    def _absorbed(
        self,
        q: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        key: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """As :meth:`_expanded`; scores q (W c) are (q W) c for latents c, and outputs sum_j p_j (U c_j) are U sum_j p_j c_j."""
        [weight] = local_tensors((self.kv_b_proj.weight,))
        weight = weight.to(q.dtype).unflatten(0, (-1, self.nope_dim + self.value_dim))  # (H, N + V, R)
        to_keys, to_values = weight.split((self.nope_dim, self.value_dim), dim=1)
        q, k = _joined(q @ to_keys, q_rope), _joined(latent, key)
        y = F.scaled_dot_product_attention(q, k, latent, mask, enable_gqa=True, **options)
        return y @ to_values.mT


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat((one, other), dim=-1)


def in_pairs(x: Tensor) -> Tensor:
    """Puts the pairs (x[2i], x[2i + 1]), in which DeepSeek rotates, where :func:`rotate` has them: at i and i + P/2."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
