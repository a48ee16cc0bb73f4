"""Learned keys and values that every token of a decoder sees, as if tokens came before each document.

Shapes: B rows, T tokens, n virtual tokens, C features, G key-value heads of D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError
from plugins.networks.parts.attention import Attention
from plugins.networks.parts.block import Block
from plugins.networks.parts.decoder import Decoder
from plugins.networks.parts.padded_cache import PaddedCache
from toolkit.adapters import Adapter, change_layer

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

KeysAndValues = tuple[Tensor, Tensor]
Making = Callable[[], KeysAndValues]
"""Returns keys and values, (1, G, n, D) each; called within the block that sees them, where its weights are gathered."""


class VirtualTokens(nn.Module, ABC):
    """What is learned; a subclass says how keys and values come of it.

    Args:
        count: n.

    Attributes:
        shift: By how many positions texts are moved.
    """

    shift = 0

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    @abstractmethod
    def forward(self, network: Any, blocks: Mapping[int, nn.Module]) -> Mapping[int, Making]:
        """Returns for each of these blocks, by its index, what makes its keys and values."""


class _Seen:
    """The cache of a block that sees virtual tokens: these are in front of what it returns, and not in the cache."""

    def __init__(self, cache: Any, make: Making) -> None:
        self.cache, self.make = cache, make

    def append(self, key: Tensor, value: Tensor) -> KeysAndValues:
        """Returns keys and values of virtual tokens, of those so far, and new ones."""
        if self.cache is not None:
            key, value = self.cache.append(key, value)
        own_key, own_value = (x.to(key.dtype).expand(len(key), -1, -1, -1) for x in self.make())
        return torch.cat((own_key, key), dim=2), torch.cat((own_value, value), dim=2)


class _Recorded:
    """A cache that keeps the keys and values of one call, with their gradients."""

    found: KeysAndValues

    def append(self, key: Tensor, value: Tensor) -> KeysAndValues:
        self.found = key, value
        return key, value


def keys_and_values(block: Block, x: Tensor, rope: Tensor | None) -> KeysAndValues:
    """Returns those of a block for tokens, given what it is called with, x (1, n, C) and their sines and cosines."""
    recorded = _Recorded()
    given = block.attention_norm(x) if block.placement in ("pre", "sandwich") else x
    block.attention(given, rope, None, recorded)
    return recorded.found


class SeesVirtualTokens(Decoder):
    """A decoder to which virtual tokens were added: each token of each document sees them.

    They are arguments of each block, and no state, so that activations can be computed again.
    """

    virtual: VirtualTokens

    def rotary(self, count: int) -> list[Tensor | None]:
        """Returns for each block sines and cosines of the first positions; None: it has none."""
        return self._rotary(torch.arange(count, device=self.embed_tokens.weight.device))

    def _run(
        self,
        blocks: Mapping[int, nn.Module],
        batch: Mapping[str, Tensor],
        hidden: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        if self.virtual.shift:
            batch = {**batch, "position_ids": self._positions(batch, cache) + self.virtual.shift}
        found = self.virtual(self, blocks) if blocks else {}
        seeing: Any = {index: partial(_call, block, found[index]) for index, block in blocks.items()}
        return super()._run(seeing, batch, hidden, cache)

    def _positions(self, batch: Mapping[str, Tensor], cache: Any) -> Tensor:
        positions = batch.get("position_ids")
        if positions is not None:
            return positions
        ids = batch["input_ids"]
        start = cache[0].length if cache else 0
        if isinstance(cache, PaddedCache) and cache.visible is not None:
            return cache.positions(start, start + ids.shape[1])
        return torch.arange(start, start + ids.shape[1], device=ids.device)

    def _fuses(self, device: torch.device, length: int) -> bool:
        return False  # masks are padded

    def _masks(self, start: int, end: int, document_ids: Any, positions: Tensor, *rest: Any) -> list[Any]:
        count, length = self.virtual.count, end - start
        made: dict[int, Any] = {}
        masks = super()._masks(start, end, document_ids, positions, *rest)
        for mask in masks:
            if mask is None and length > 1:  # it was causal, from the first token on
                shape = length, count + length
                made[id(mask)] = torch.ones(shape, dtype=torch.bool, device=positions.device).tril(count)
            else:
                made[id(mask)] = None if mask is None else F.pad(mask, (count, 0), value=True)
        return [made[id(mask)] for mask in masks]


def _call(block: nn.Module, make: Making, x: Tensor, rope: Tensor | None, mask: Any, cache: Any) -> Tensor:
    return block(x, rope, mask, _Seen(cache, make))  # type: ignore[no-any-return]


def _fits(block: nn.Module) -> bool:
    attention = block.attention if isinstance(block, Block) else None
    return isinstance(attention, Attention) and attention.causal


class VirtualTokenAdapter(Adapter):
    """Base class of adapters that add virtual tokens.

    Args:
        count: n.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{type(self).__name__}: count is {count}; it must be at least 1.")
        self.count = count

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where a strategy takes heads, rows or blocks apart."""
        for name in ("tensor", "context", "pipeline"):
            if any((item.arguments.get(name) or 1) > 1 for item in run.selected):
                yield f"{cls.__name__} needs all heads, whole rows and all blocks on each rank: set {name} to 1"

    @abstractmethod
    def tokens_of(self, network: Decoder) -> VirtualTokens:
        """Returns what is learned, for a network that may be on the meta device."""

    def adapt(self, network: Network) -> None:
        """Adds the virtual tokens to a decoder.

        Raises:
            ConfigError: If it is none whose blocks all have attention to tokens before, or has no room for them.
        """
        name = type(network).__name__
        fits = isinstance(network, Decoder) and not isinstance(network, SeesVirtualTokens)
        if not fits or not all(map(_fits, network.blocks)):
            raise ConfigError(
                f"{type(self).__name__}: {name} is no decoder whose blocks all attend to keys and values of the tokens before, "
                "or has virtual tokens.\nTake one such as Llama, Qwen3 or GPT; or LoRA."
            )
        assert isinstance(network, Decoder)
        virtual = self.tokens_of(network)
        if virtual.shift:
            network.max_sequence_length -= virtual.shift
            if network.max_sequence_length < 1:
                raise ConfigError(
                    f"{type(self).__name__}: count is {self.count}, and {name} takes {virtual.shift + network.max_sequence_length} "
                    "tokens: no text fits behind them."
                )
        change_layer(network, SeesVirtualTokens).virtual = virtual.to(next(network.parameters()).device)
