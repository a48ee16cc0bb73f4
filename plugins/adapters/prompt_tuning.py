"""Learned embeddings in front of each text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.technique import technique
from plugins.adapters.virtual_tokens import Making, VirtualTokenAdapter, VirtualTokens, keys_and_values
from plugins.networks.parts.decoder import Decoder


class Prompts(VirtualTokens):
    """Embeddings of virtual tokens, (n, C), float32, and what the network's blocks make of them.

    A token sees those before it alone: keys and values of virtual tokens are the same for each text, and are computed once for all rows.

    Args:
        count: n.
        network: Whose width they have, and of whose token embeddings their spread is.
    """

    def __init__(self, count: int, network: Decoder) -> None:
        super().__init__(count)
        self.shift = count
        weight = network.embed_tokens.weight
        self.embeddings = nn.Parameter(torch.empty(count, network.n_embd, device=weight.device))
        if not weight.is_meta:
            nn.init.normal_(self.embeddings, std=float(weight.detach().float().std()))

    def embedded(self) -> Tensor:
        """Returns what the first block is given, (n, C)."""
        return self.embeddings

    def forward(self, network: Any, blocks: Mapping[int, nn.Module]) -> Mapping[int, Making]:
        """Returns what makes those of the blocks; those before the last of them are run on the virtual tokens."""
        ropes, found = network.rotary(self.count), {}
        x = self.embedded()[None].to(network.embed_tokens.weight.dtype)
        for index in range(max(blocks) + 1):
            block = network.layers[index]
            found[index] = partial(keys_and_values, block, x, ropes[index])
            if index < max(blocks):
                x = block(x, ropes[index], None, None)
        return found


@technique(paper="Prompt Tuning, arXiv:2104.08691, section 2")
class PromptTuning(VirtualTokenAdapter):
    """Trains the embeddings of n virtual tokens, which come before each document: n C parameters.

    A text is computed as if these tokens were in front of it, at the first n positions; in packed rows each document has them. Labels,
    documents and caches are those of the text alone, and the longest text is n tokens shorter. An embedding of positions, as GPT has
    it, is not added to them: they learn their own. In layers with a window they stay visible. They begin with the spread of
    the network's token embeddings, and cannot be merged into the weights.

    Args:
        count: n.

    Raises:
        ConfigError: If `count` is below 1 or leaves no room for texts, or the network is no decoder with attention in each block.

    Example:
        trainer:
          callbacks+:
            - class_path: PromptTuning
              init_args: {count: 8}
    """

    def __init__(self, count: int = 8) -> None:
        super().__init__(count)

    def tokens_of(self, network: Decoder) -> VirtualTokens:
        """Returns the embeddings."""
        return Prompts(self.count, network)
