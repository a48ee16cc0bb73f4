"""Gated DeltaNet: a state that forgets by a gate, and replaces what it holds under a key."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.parts.linear_recurrence import Segments
from plugins.networks.parts.recurrent_mixer import (
    RecurrentMixer,
    ShortConvolution,
    StateCache,
    decay_rates,
    decay_steps,
    log_decay,
)


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet, arXiv:2412.06464: S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t.

    Queries, keys and values pass a short convolution; queries and keys have norm 1, queries then K^-0.5. The gate a_t is
    exp(-A softplus(W x_t + dt_bias)). Heads are normalised, and gated by SiLU. Names and weights are those of
    OlmoHybridGatedDeltaNet in transformers.

    Args:
        n_embd: Width C.
        n_head: Heads of queries and keys.
        n_value_head: Heads of values, a multiple of `n_head`: each key serves several.
        key_dim: Features K of a query and key.
        value_dim: Features V of a value.
        norm_eps: Epsilon of the norm of heads.
        taps: Tokens that a convolution sees.
        negative_eigenvalues: Whether beta is in (0, 2) and not in (0, 1): a token may turn the state's sign,
            arXiv:2411.12537.
    """

    chunk_size = 64
    starts = {"A_log": decay_rates, "dt_bias": decay_steps}

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_value_head: int,
        key_dim: int,
        value_dim: int,
        norm_eps: float,
        taps: int = 4,
        negative_eigenvalues: bool = False,
    ):
        super().__init__()
        self.key_dim, self.value_dim, self.n_head = key_dim, value_dim, n_head
        self.strength = 2.0 if negative_eigenvalues else 1.0
        # the delta rule solves for what is written, and reads the state twice
        self.state_size = n_value_head * key_dim * value_dim * 3 // 2
        self.score_size = n_value_head * (3 * key_dim + 2 * value_dim)
        keys, values = n_head * key_dim, n_value_head * value_dim
        self.q_proj = nn.Linear(n_embd, keys, bias=False)
        self.k_proj = nn.Linear(n_embd, keys, bias=False)
        self.v_proj = nn.Linear(n_embd, values, bias=False)
        self.a_proj = nn.Linear(n_embd, n_value_head, bias=False)
        self.b_proj = nn.Linear(n_embd, n_value_head, bias=False)
        self.g_proj = nn.Linear(n_embd, values, bias=False)
        self.q_conv1d = ShortConvolution(keys, taps)
        self.k_conv1d = ShortConvolution(keys, taps)
        self.v_conv1d = ShortConvolution(values, taps)
        self.A_log = nn.Parameter(torch.empty(n_value_head))
        self.dt_bias = nn.Parameter(torch.empty(n_value_head))
        self.o_norm = nn.RMSNorm(value_dim, norm_eps)
        self.o_proj = nn.Linear(values, n_embd, bias=False)

    def mix(self, x: Tensor, segments: Segments | None, cache: StateCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C)."""
        q, k, v = (
            self.convolve(f"{name}_conv1d", project(x), segments, cache)
            for name, project in (("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))
        )
        q, k = (unit(y.unflatten(2, (self.n_head, 1, -1))) for y in (q, k))
        v, a, b = (y.unflatten(2, (self.n_head, -1)) for y in (v, self.a_proj(x), self.b_proj(x)))
        v = v.unflatten(3, (-1, self.value_dim))
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        dt = F.softplus(a + self.dt_bias.view(self.n_head, -1))
        decay = log_decay(self.A_log.view(self.n_head, -1), dt)
        q, k, v, decay = (y.movedim(1, 3) for y in (q * self.key_dim**-0.5, k, v, decay[..., None]))
        beta = b.sigmoid().movedim(1, 3) * self.strength
        y = self.recur(q, k, v, decay, segments, cache, beta).movedim(3, 1).flatten(2, 3).contiguous()
        gate = F.silu(self.g_proj(x).unflatten(2, (-1, self.value_dim)))
        return self.o_proj((self.o_norm(y) * gate).flatten(2))


def unit(x: Tensor) -> Tensor:
    """Scales vectors (..., D) to norm 1, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
