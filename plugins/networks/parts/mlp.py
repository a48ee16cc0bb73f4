"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """Two projections with an activation between; a gate adds a third: down(activation(gate(x)) * up(x)).

    Gates are those of arXiv:2002.05202: with "silu" it is SwiGLU, with "gelu" GEGLU. `dropout` is that before the last
    projection, as in T5.
    """

    def __init__(
        self,
        n_embd: int,
        intermediate_size: int,
        activation: str,
        bias: bool,
        gated: bool,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[activation], dropout
        self.gate_proj = nn.Linear(n_embd, intermediate_size, bias) if gated else None
        self.up_proj = nn.Linear(n_embd, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, n_embd, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., C) to (..., C)."""
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x))
        else:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        if self.dropout:
            inner = F.dropout(inner, self.dropout, self.training)
        return self.down_proj(inner)
