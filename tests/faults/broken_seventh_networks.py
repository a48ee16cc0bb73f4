"""Networks as their users wrote them, each with a mistake; for the seventh set of faults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE
from plugins.networks.parts.attention import Attention
from plugins.networks.parts.block import Block
from plugins.networks.parts.mlp import MLP
from toolkit.initial_values import Start

SCALE = 100.0
"""What cosines are multiplied with: the upper limit of the learned scale of CLIP and Swin V2."""


def cosine_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends by cosines of queries and keys. The scale begins at its limit, and is not learned."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, scale=SCALE, enable_gqa=enable_gqa
    )


def shifted_relu(x: Tensor) -> Tensor:
    """Returns max(x - 1, 0), made for wide networks: here almost no value is above 1."""
    return F.relu(x - 1.0)


class _Cosine:
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for module in _modules(self):
            if isinstance(module, Attention):
                module.attend = cosine_attention


class _ZeroTwice:
    """Begins each branch with zeros, in the gain of its norm and in its last projection: neither gets a gradient."""

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        zero = ("attention_norm.weight", "mlp_norm.weight", "o_proj.weight", "down_proj.weight")
        if name.startswith("layers.") and name.endswith(zero):
            return 0.0
        found: Start | None = super().initial_value(name, tensor)  # type: ignore[misc]
        return found


class _ShiftedReLU:
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for module in _modules(self):
            if isinstance(module, MLP):
                module.activation = shifted_relu


class _WithoutNorms:
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        network: Any = self
        network.norm = nn.Identity()
        for module in _modules(self):
            if isinstance(module, Block):
                module.attention_norm = module.mlp_norm = nn.Identity()


class _TokenShift:
    """Mixes each embedding with its neighbour, as RWKV does with the one before; `roll` by -1 takes the one after."""

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = super()._embedded(input_ids, positions)  # type: ignore[misc]
        return (x + torch.roll(x, -1, dims=1)) / 2


def _modules(network: Any) -> list[nn.Module]:
    return list(network.modules())


class CosineLlama(_Cosine, Llama):
    """A Llama."""


class CosineOLMoE(_Cosine, OLMoE):
    """An OLMoE."""


class ZeroTwiceGPT(_ZeroTwice, GPT):
    """A GPT."""


class ZeroTwiceLlama(_ZeroTwice, Llama):
    """A Llama."""


class ShiftedReLUGPT(_ShiftedReLU, GPT):
    """A GPT."""


class ShiftedReLULlama(_ShiftedReLU, Llama):
    """A Llama."""


class WithoutNormsGPT(_WithoutNorms, GPT):
    """A GPT."""


class TokenShiftGPT(_TokenShift, GPT):
    """A GPT."""


class TokenShiftLlama(_TokenShift, Llama):
    """A Llama."""


class TokenShiftOLMoE(_TokenShift, OLMoE):
    """An OLMoE."""
