"""Networks with mistakes, as users write them who derive from leyden's own."""

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
from toolkit.initial_values import Start


class Unfinished(Decoder):
    """Its loop over the blocks ends one too early."""

    def _run(
        self, blocks: Mapping[int, nn.Module], batch: Mapping[str, Tensor], hidden: Any, cache: Any = None
    ) -> Tensor:
        taken = {index: blocks[index] for index in range(self.n_layer - 1)}
        return super()._run(taken, batch, hidden, cache)


class UnfinishedGPT(Unfinished, GPT):
    pass


class UnfinishedLlama(Unfinished, Llama):
    pass


class UnfinishedOLMoE(Unfinished, OLMoE):
    pass


class SparseGPT(GPT):
    """Starts the biases of its MLPs far below zero, so that few units are active."""

    def initial_value(self, name: str, tensor: Tensor) -> Start | None:
        return -2.0 if name.endswith("up_proj.bias") else super().initial_value(name, tensor)


class Loud(Decoder):
    """Multiplies logits with the width, by which muP divides them."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.n_embd


class LoudGPT(Loud, GPT):
    pass


class LoudLlama(Loud, Llama):
    pass


class LoudOLMoE(Loud, OLMoE):
    pass


class Uncausal(Decoder):
    """Hands a mask to the attention, of documents alone or of everything, and so loses the causal one."""

    def _masks(self, start: int, end: int, documents: Any, positions: Tensor, *rest: Any) -> list[Any]:
        if documents is None:
            mask = torch.ones(end - start, end, dtype=torch.bool, device=positions.device)
        else:
            mask = document_mask(documents, documents)
        return [mask] * self.n_layer


class UncausalGPT(Uncausal, GPT):
    pass


class UncausalLlama(Uncausal, Llama):
    pass


class UncausalOLMoE(Uncausal, OLMoE):
    pass


class Flat(Decoder):
    """Lays all rows of a batch out as one, as kernels for rows of any length want it, without where each begins."""

    def _run(
        self, blocks: Mapping[int, nn.Module], batch: Mapping[str, Tensor], hidden: Any, cache: Any = None
    ) -> Tensor:
        ids = batch["input_ids"]
        length = ids.shape[1]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=ids.device).expand_as(ids)
        positions = positions.reshape(1, -1)
        x = self._embedded(ids.reshape(1, -1), positions)
        ropes = self._rotary(positions)
        for index, block in blocks.items():
            x = block(x, ropes[index], None, None)
        return x.view(*ids.shape, -1)


class FlatGPT(Flat, GPT):
    pass


class FlatOLMoE(Flat, OLMoE):
    pass
