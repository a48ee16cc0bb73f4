"""Networks with the mistakes of the eighth set: those of the recipes, each with a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.olmoe import OLMoE
from plugins.networks.parts.attention import document_mask
from plugins.networks.parts.decoder import Decoder
from toolkit.initial_values import Start, normal


class OneShort(Decoder):
    """The loop over the blocks ends one too early."""

    def _run(
        self, blocks: Mapping[int, nn.Module], batch: Mapping[str, Tensor], hidden: Any, cache: Any = None
    ) -> Tensor:
        run = {index: block for index, block in blocks.items() if index < self.n_layer - 1}
        return super()._run(run, batch, hidden, cache)


class OneShortGPT(OneShort, GPT):
    """See :class:`OneShort`."""


class OneShortLlama(OneShort, Llama):
    """See :class:`OneShort`."""


class OneShortOLMoE(OneShort, OLMoE):
    """See :class:`OneShort`."""


class NotCausal(Decoder):
    """Attention is given a mask of padding and documents in place of the causal one, not in addition to it."""

    def _masks(self, start: int, end: int, document_ids: Any, *rest: Any) -> list[Any]:
        if document_ids is None:
            mask = torch.ones(end - start, end, dtype=torch.bool)
        else:
            mask = document_mask(document_ids, document_ids)
        return [mask] * self.n_layer


class NotCausalGPT(NotCausal, GPT):
    """See :class:`NotCausal`."""


class NotCausalLlama(NotCausal, Llama):
    """See :class:`NotCausal`."""


class UnitEmbedding(Decoder):
    """The embedding, which the head shares, begins as `nn.Embedding` begins: N(0, 1)."""

    def init_weights(self) -> None:
        """Initialises every parameter."""
        super().init_weights()
        self.embed_tokens.reset_parameters()


class UnitEmbeddingGPT(UnitEmbedding, GPT):
    """See :class:`UnitEmbedding`."""


class UnitEmbeddingLlama(UnitEmbedding, Llama):
    """See :class:`UnitEmbedding`."""


class UnitEmbeddingOLMoE(UnitEmbedding, OLMoE):
    """See :class:`UnitEmbedding`."""


class WithoutNorms(Decoder):
    """A deep network whose blocks have no norms."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for block in self.layers:
            block.attention_norm, block.mlp_norm = nn.Identity(), nn.Identity()


class WithoutNormsGPT(WithoutNorms, GPT):
    """See :class:`WithoutNorms`."""

    def __init__(self, std: float = 0.3, **arguments: Any) -> None:
        self.std = std
        super().__init__(**arguments)

    def _matrix(self, name: str, weight: Tensor) -> Start:
        return normal(self.std) if name.startswith("layers.") else super()._matrix(name, weight)


class WithoutNormsLlama(WithoutNorms, Llama):
    """See :class:`WithoutNorms`."""
