"""Mamba-2's mixer: a state space with one decay rate a head."""

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


class GroupedRMSNorm(nn.RMSNorm):
    """RMSNorm of each of several groups of the features by itself."""

    def __init__(self, dim: int, groups: int, eps: float):
        super().__init__(dim, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., dim), in float32 or wider, then in its data type."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(wide, wide.shape[-1:], eps=self.eps).flatten(-2).type_as(x)


class StateSpace(RecurrentMixer):
    """Mamba-2's mixer, arXiv:2405.21060: S_t = exp(-A dt_t) S_{t-1} + B_t (dt_t x_t)^T, y_t = S_t^T C_t + D x_t.

    x, B and C pass a short convolution; dt is softplus(W u_t + dt_bias). B and C, of `state_size` features, serve all
    heads of a group. The output is gated by SiLU, and normalised in each group. Names and weights are those of Mamba2Mixer in
    transformers.

    Args:
        n_embd: Width.
        n_head: Heads.
        head_dim: Features of a head: V.
        state_size: Features of B and C: K.
        n_groups: Groups of heads, a divisor of `n_head`.
        norm_eps: Epsilon of the norm.
        taps: Tokens that the convolution sees.
        bias: Whether the projections have biases.
        conv_bias: Whether the convolution has one.
    """

    chunk_size = 64
    starts = {"A_log": decay_rates, "dt_bias": decay_steps, "D": 1.0}

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        head_dim: int,
        state_size: int,
        n_groups: int,
        norm_eps: float,
        taps: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
    ):
        super().__init__()
        width, shared = n_head * head_dim, n_groups * state_size
        self.head_dim, self.n_groups = head_dim, n_groups
        self.sizes = (width, width + 2 * shared, n_head)
        self.inner = (width, shared, shared)
        self.state_size = n_head * head_dim * state_size
        self.score_size = n_groups * state_size + n_head * head_dim
        self.in_proj = nn.Linear(n_embd, sum(self.sizes), bias)
        self.conv1d = ShortConvolution(width + 2 * shared, taps, conv_bias)
        self.A_log = nn.Parameter(torch.empty(n_head))
        self.dt_bias = nn.Parameter(torch.empty(n_head))
        self.D = nn.Parameter(torch.empty(n_head))
        self.norm = GroupedRMSNorm(width, n_groups, norm_eps)
        self.out_proj = nn.Linear(width, n_embd, bias)

    def mix(self, x: Tensor, segments: Segments | None, cache: StateCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C)."""
        gate, inner, dt = self.in_proj(x).split(self.sizes, dim=2)
        inner, b, c = self.convolve("conv1d", inner, segments, cache).split(self.inner, dim=2)
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias)
        decay, dt, inner = (  # (B, groups, heads of a group, T, ...)
            y.unflatten(2, (self.n_groups, -1)).movedim(1, 3)
            for y in (
                log_decay(self.A_log, dt)[..., None],
                dt[..., None],
                inner.unflatten(2, (-1, self.head_dim)),
            )
        )
        b, c = (y.unflatten(2, (self.n_groups, 1, -1)).movedim(1, 3) for y in (b, c))
        y = self.recur(c, b, (inner * dt).to(wide), decay, segments, cache)
        y = y + inner * self.D.view(self.n_groups, -1, 1, 1)
        y = y.movedim(3, 1).flatten(2).to(wide) * F.silu(gate.to(wide))
        return self.out_proj(self.norm(y).to(x.dtype))
