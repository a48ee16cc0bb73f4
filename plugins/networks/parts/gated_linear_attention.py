"""Gated linear attention: linear attention whose state decays by a gate for each key feature."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.parts.linear_recurrence import Segments
from plugins.networks.parts.recurrent_mixer import RecurrentMixer, StateCache


class GatedLinearAttention(RecurrentMixer):
    """Gated linear attention, arXiv:2312.06635: S_t = diag(a_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(K).

    The gate a_t is sigmoid(W2 W1 x_t + b)^(1/16), W1 of `gate_rank` rows. Heads are normalised, and gated by SiLU.

    Args:
        n_embd: Width C.
        n_head: Heads.
        key_dim: Features K of a query and key.
        value_dim: Features V of a value.
        norm_eps: Epsilon of the norm of heads.
        gate_rank: Rank of the gate's projection.
    """

    chunk_size = 8  # scores take C * C * K numbers: the fastest on a CPU

    def __init__(
        self, n_embd: int, n_head: int, key_dim: int, value_dim: int, norm_eps: float, gate_rank: int = 16
    ):
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        self.state_size, self.score_size = n_head * key_dim * value_dim, n_head * (key_dim + value_dim)
        self.q_proj = nn.Linear(n_embd, n_head * key_dim, bias=False)
        self.k_proj = nn.Linear(n_embd, n_head * key_dim, bias=False)
        self.v_proj = nn.Linear(n_embd, n_head * value_dim, bias=False)
        self.g_proj = nn.Linear(n_embd, n_head * value_dim, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(n_embd, gate_rank, bias=False), nn.Linear(gate_rank, n_head * key_dim)
        )
        self.o_norm = nn.RMSNorm(value_dim, norm_eps)
        self.o_proj = nn.Linear(n_head * value_dim, n_embd, bias=False)

    def mix(self, x: Tensor, segments: Segments | None, cache: StateCache | None) -> Tensor:
        """Maps x (B, T, C) to (B, T, C)."""
        q, k, gate = (
            y.unflatten(2, (-1, self.key_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.gk_proj(x))
        )
        v, g = (y.unflatten(2, (-1, self.value_dim)) for y in (self.v_proj(x), self.g_proj(x)))
        decay = F.logsigmoid(gate.float() if gate.dtype.itemsize < 4 else gate) / 16
        y = self.recur(q * self.key_dim**-0.5, k, v.transpose(1, 2), decay, segments, cache)
        return self.o_proj((self.o_norm(y.transpose(1, 2).contiguous()) * F.silu(g)).flatten(2))
