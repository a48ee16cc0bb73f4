"""Networks with mistakes, for the sixth set: families of ours as a user changes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE
from plugins.networks.parts.block import Block
from toolkit.routing import Routing


class Changed(nn.Module):
    """What changes a network of ours once it is built."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        with torch.no_grad():
            self.change()

    def change(self) -> None:
        raise NotImplementedError


class OwnAttention(Changed):
    """Attention through a function of the user."""

    layers: nn.ModuleList

    def change(self) -> None:
        blocks: Any = self.layers
        for block in blocks:
            block.attention.attend = self.attend

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *rest: Any, **options: Any) -> Tensor:
        raise NotImplementedError


class Unmasked(OwnAttention):
    """Attention within documents that has lost its direction: it passes a mask on, or none, and no `is_causal`."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *rest: Any, **options: Any) -> Tensor:
        both = None if mask is None else mask | mask.mT
        return scaled_dot_product_attention(q, k, v, both, enable_gqa=options.get("enable_gqa", False))


class CausalOnly(OwnAttention):
    """Attention that is causal and looks at no mask."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *rest: Any, **options: Any) -> Tensor:
        grouped = options.get("enable_gqa", False)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Multiplied(Changed):
    """Attention whose queries and keys are each multiplied by the root of the features, and scores not divided by it."""

    layers: nn.ModuleList

    def change(self) -> None:
        blocks: Any = self.layers
        for block in blocks:
            block.attention.query_scale = float(block.attention.head_dim)


class BareBlock(Block):
    """A block that adds nothing to what it was given: it forgets it."""

    def forward(self, x: Tensor, rope: Tensor | None, mask: Any, cache: Any) -> Tensor:
        return self.mlp(self.mlp_norm(self.attention(self.attention_norm(x), rope, mask, cache)))


class NoResidual(Changed):
    """Blocks without residual connections."""

    layers: nn.ModuleList

    def change(self) -> None:
        for block in self.layers:
            block.__class__ = BareBlock


class TorchsOwn(Changed):
    """Weights as torch's modules begin with them: embeddings, which the head shares, are N(0, 1)."""

    def change(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()


class GatedBlock(Block):
    """A block whose two parts are added through a gate, as in ReZero."""

    gate: nn.Parameter

    def forward(self, x: Tensor, rope: Tensor | None, mask: Any, cache: Any) -> Tensor:
        x = x + self.gate * self.attention(self.attention_norm(x), rope, mask, cache)
        return x + self.gate * self.mlp(self.mlp_norm(x))


class ZeroTwice(Changed):
    """Blocks of which gates and output projections both begin with zeros: neither ever has a gradient."""

    layers: nn.ModuleList

    def change(self) -> None:
        for block in self.layers:
            for name, parameter in block.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
            block.__class__ = GatedBlock
            block.gate = nn.Parameter(torch.zeros(()))


class UnmaskedGPT(Unmasked, GPT):
    """A GPT of this kind."""


class UnmaskedLlama(Unmasked, Llama):
    """A Llama of this kind."""


class CausalOnlyLlama(CausalOnly, Llama):
    """A Llama of this kind."""


class MultipliedLlama(Multiplied, Llama):
    """A Llama of this kind."""


class NoResidualLlama(NoResidual, Llama):
    """A Llama of this kind."""


class TorchsOwnGPT(TorchsOwn, GPT):
    """A GPT of this kind."""


class TorchsOwnLlama(TorchsOwn, Llama):
    """A Llama of this kind."""


class ZeroTwiceLlama(ZeroTwice, Llama):
    """A Llama of this kind."""


class NegativeBiasGPT(Changed, GPT):
    """Biases of the MLP begin at -1, as those of gates do."""

    def change(self) -> None:
        blocks: Any = self.layers
        for block in blocks:
            block.mlp.up_proj.bias.fill_(-1.0)


class SelfBalancedOLMoE(Changed, OLMoE):
    """Experts that are balanced by a bias, as DeepSeek-V3's; its sign is the wrong one."""

    def change(self) -> None:
        for router in self.routers:
            router.e_score_correction_bias = torch.zeros(len(router.weight))
            router.register_forward_hook(_move_bias)


def _move_bias(router: Any, inputs: Any, routing: Routing) -> None:
    if router.training and torch.is_grad_enabled():
        bias = router.e_score_correction_bias
        loads = routing.experts.flatten().bincount(minlength=len(bias)).float()
        bias += 0.02 * (loads - loads.mean()).sign()
