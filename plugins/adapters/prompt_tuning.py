"""Learned embeddings in front of each text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from plugins.adapters.peft_folder import PeftFolder
from plugins.adapters.virtual_tokens import Making, VirtualTokenAdapter, VirtualTokens, keys_and_values
from plugins.networks.parts.decoder import Decoder
from toolkit.initial_values import start_as_spread

TYPE, EMBEDDINGS = "PROMPT_TUNING", "prompt_embeddings"
"""Of peft: the kind of its folder, the tensor in it."""


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
        start_as_spread(self.embeddings, weight, network, "virtual.embeddings")

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


@technique(paper="Prompt Tuning, arXiv:2104.08691, section 2", offers=("keeps_weights",))
class PromptTuning(VirtualTokenAdapter):
    """Trains the embeddings of n virtual tokens, which come before each document: n C parameters.

    A text is computed as if these tokens were in front of it, at the first n positions; in packed rows each document has them. Labels,
    documents and caches are those of the text alone, and the longest text is n tokens shorter. An embedding of positions, as GPT has
    it, is not added to them: they learn their own. In layers with a window they stay visible. They begin with the spread of
    the network's token embeddings, and cannot be merged into the weights.

    Args:
        count: n.
        weights: A folder that peft or `export --format peft` wrote, to start from; its number of tokens holds.

    Raises:
        ConfigError: If `count` is below 1 or leaves no room for texts, or the network is no decoder with attention in each block,
            or `weights` do not fit it.

    Example:
        trainer:
          callbacks+:
            - class_path: PromptTuning
              init_args: {count: 8}
    """

    def __init__(self, count: int = 8, weights: str | None = None) -> None:
        super().__init__(count)
        self.weights = weights

    def tokens_of(self, network: Decoder) -> VirtualTokens:
        """Returns the embeddings."""
        if self.weights is None:
            return Prompts(self.count, network)
        folder = PeftFolder(self.weights)
        folder.check_type(TYPE)
        stored = folder.tensors.get(EMBEDDINGS)
        if stored is None or len(stored.shape) != 2 or stored.shape[0] < 1:
            raise ConfigError(
                f"{folder.path}: it has no {EMBEDDINGS} of (tokens, features), as peft writes them."
            )
        self.count = stored.shape[0]
        prompts = Prompts(self.count, network)
        folder.fill(prompts.embeddings, stored, network, EMBEDDINGS)
        return prompts

    def peft_form(self, network: Network) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns what peft's files hold; see `toolkit.adapters.HasPeftForm`."""
        assert isinstance(network, Decoder)
        if getattr(network, "embed_positions", None) is not None:
            raise ConfigError(
                f"--format peft: peft adds {type(network).__name__}'s embeddings of positions to virtual tokens, and here they have none."
            )
        sizes = {
            "num_layers": network.n_layer,
            "num_attention_heads": network.n_head,
            "token_dim": network.n_embd,
        }
        config = {"peft_type": TYPE, "task_type": "CAUSAL_LM", "num_virtual_tokens": self.count, **sizes}
        return config | {"num_transformer_submodules": 1, "inference_mode": True}, {
            EMBEDDINGS: "virtual.embeddings"
        }
