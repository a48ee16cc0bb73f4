"""Learned keys and values in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.technique import technique
from plugins.adapters.virtual_tokens import KeysAndValues, Making, VirtualTokenAdapter, VirtualTokens
from plugins.networks.parts.decoder import Decoder
from toolkit.initial_values import normal, start_added

STD = 0.02


class Prefix(VirtualTokens):
    """Keys and values of each layer, (L, G, n, D), float32.

    Args:
        count: n.
        network: Whose sizes they have.
    """

    def __init__(self, count: int, network: Decoder) -> None:
        super().__init__(count)
        device = next(network.parameters()).device
        shape = network.n_layer, network.n_kv_head, count
        self.keys = nn.Parameter(torch.empty(*shape, network.head_dim, device=device))
        self.values = nn.Parameter(torch.empty(*shape, network.value_dim, device=device))
        for name, parameter in self.named_parameters():
            start_added(parameter, normal(STD), network, f"virtual.{name}")

    def forward(self, network: Any, blocks: Mapping[int, nn.Module]) -> Mapping[int, Making]:
        """Returns what makes those of the blocks."""
        return {index: partial(_pair, self.keys[index, None], self.values[index, None]) for index in blocks}


def _pair(keys: Tensor, values: Tensor) -> KeysAndValues:
    return keys, values


@technique(
    paper="Prefix-Tuning, arXiv:2101.00190, section 4.2; P-Tuning v2, arXiv:2110.07602, section 3.2",
    offers=("keeps_weights",),
)
class PrefixTuning(VirtualTokenAdapter):
    """Trains keys and values of n virtual tokens in each layer, which every token of each document sees.

    They are the parameters themselves, without the paper's network that makes them, as in P-Tuning v2: 2 n G D for each layer. They have
    no rotary position, and the positions of texts stay. Labels, documents of a row and caches are those of the text alone. In layers
    with a window they stay visible. They begin as N(0, 0.02), and cannot be merged into the weights.

    Args:
        count: n.

    Raises:
        ConfigError: If `count` is below 1, or the network is no decoder with attention in each block.

    Example:
        trainer:
          callbacks+:
            - class_path: PrefixTuning
              init_args: {count: 16}
    """

    def __init__(self, count: int = 16) -> None:
        super().__init__(count)

    def tokens_of(self, network: Decoder) -> VirtualTokens:
        """Returns the keys and values."""
        return Prefix(self.count, network)
