"""Rows of token ids that grow together, and the logits of the token that follows each.

Shapes: B rows, T tokens, V token ids.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from core.contracts import Network

__all__ = ["KeepsPrefix", "PadsPrompts", "Rows", "evaluating"]


@runtime_checkable
class PadsPrompts(Protocol):
    """A network whose cache holds rows of different lengths, so that prompts of different lengths are one batch.

    Others generate several rows one after another, each with the cache of its own.
    """

    def new_padded_cache(self, padding: Tensor, max_length: int) -> Any:
        """Returns an empty cache for rows that begin with padding; None if the network has no cache.

        With it, `forward` gives for the tokens behind the padding what it gives for them alone: their positions begin
        at 0, and they do not depend on the padding. What it gives for the padding has no meaning, but is finite.

        Args:
            padding: How many ids in front of each row are padding, (B,), on the device.
            max_length: Tokens of a row at most, padding included.
        """

    def select_cache_rows(self, cache: Any, rows: Tensor) -> None:
        """Changes a cache of `new_padded_cache` to these of its rows, (b,) indexes; one may come several times."""


@runtime_checkable
class KeepsPrefix(Protocol):
    """A network whose cache can go back to its first tokens, so that a text that begins with them need not compute them."""

    def keep_cache_prefix(self, cache: Any, length: int, max_length: int) -> bool:
        """Changes a cache of `new_padded_cache` to its first tokens; returns whether it could, otherwise it is of no use.

        Args:
            cache: The cache of one row without padding.
            length: Tokens that stay, at least 1 and at most as many as there are.
            max_length: Tokens that it has room for then.
        """


@contextmanager
def evaluating(network: torch.nn.Module) -> Iterator[None]:
    """Puts each module of a network into eval mode, and back into its own; a `train` of its own may do more, and is not called."""
    modes = [(module, module.training) for module in network.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Rows:
    """Several texts, the logits after each, and the cache behind them.

    A text longer than the network's `max_sequence_length` counts with its last tokens, at positions from 0 on. As they
    then shift with every token, cached keys are not valid: once a row is that long, nothing is cached anymore.

    Args:
        network: In eval mode, on any device.
        prompts: Token ids, at least one for each row.
        max_new_tokens: How many tokens a row gets at most.
        cached: False computes each text again for each token.
        before: Rows that are no longer needed. If both are one row and the network offers :class:`KeepsPrefix`, the cache
            of the tokens with which both begin is taken over.
    """

    def __init__(
        self,
        network: Network,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        cached: bool = True,
        before: Rows | None = None,
    ):
        self._network, self._device = network, next(network.parameters()).device
        self.ids = [list(ids) for ids in prompts]
        longest = max(len(ids) for ids in self.ids)
        self._window = network.max_sequence_length or longest + max_new_tokens
        self._cache: _Shared | _Single | None = None
        self._known = 0
        if cached and longest <= self._window:
            lengths = [min(len(ids) + max_new_tokens, self._window) for ids in self.ids]
            padding = [longest - len(ids) for ids in self.ids]
            self._cache = _new_cache(network, lengths, padding, self._window)
            if before is not None and len(self.ids) == len(before.ids) == 1:
                self._take_over(before, lengths[0])

    def _take_over(self, before: Rows, max_length: int) -> None:
        """Replaces the empty cache by that of other rows, as far as their tokens are the same."""
        network, theirs, ids = self._network, before._cache, self.ids[0]
        pairs = enumerate(zip(ids[:-1], before.ids[0], strict=False))  # the last token gives the first logits
        shared = next((place for place, (own, other) in pairs if own != other), None)
        length = min(len(ids) - 1, len(before.ids[0])) if shared is None else shared
        if not (length and isinstance(theirs, _Shared) and isinstance(network, KeepsPrefix)):
            return
        if before._network is network and network.keep_cache_prefix(theirs.cache, length, max_length):
            self._cache, self._known = theirs, length
        before._cache = None

    def first(self) -> Tensor:
        """Returns the logits (B, V) of the first token after each prompt."""
        return self._logits([ids[self._known :] for ids in self.ids])

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Adds a token to each of some rows, which are the rows from now on; returns logits (B, V) of the next token.

        Args:
            parents: For each new row the index of the former one that it continues.
            tokens: The token ids to add.
        """
        if list(parents) != list(range(len(self.ids))):
            self.ids = [list(self.ids[parent]) for parent in parents]
            if self._cache is not None:
                self._cache.select(parents)
        for ids, token in zip(self.ids, tokens, strict=True):
            ids.append(token)
        if self._cache is not None and max(len(ids) for ids in self.ids) > self._window:
            self._cache = None
        return self._logits([[token] for token in tokens])

    def _logits(self, new: Sequence[Sequence[int]]) -> Tensor:
        if self._cache is not None:
            cache, self._cache = self._cache, None  # where it is interrupted, some layers have the new tokens
            logits = self._network.logits(cache.hidden(new, self._device))
            self._cache = cache
            return logits
        windows = [ids[-self._window :] for ids in self.ids]
        # padding behind a causal network's last token changes nothing
        last = torch.tensor([len(ids) - 1 for ids in windows], device=self._device)
        hidden = self._network({"input_ids": _rectangle(windows, self._device, behind=True)})
        return self._network.logits(hidden[torch.arange(len(windows), device=self._device), last])


def _new_cache(
    network: Network, lengths: Sequence[int], padding: Sequence[int], window: int
) -> _Shared | _Single | None:
    if not isinstance(network, PadsPrompts):
        caches = [network.new_cache(1, length) for length in lengths]
        return None if caches[0] is None else _Single(network, caches)
    device = next(network.parameters()).device
    length = min(max(map(sum, zip(lengths, padding, strict=True))), window)
    cache = network.new_padded_cache(torch.tensor(padding, device=device), length)
    return None if cache is None else _Shared(network, cache)


class _Shared:
    """One cache for all rows, whose prompts are padded in front."""

    def __init__(self, network: Any, cache: Any):
        self._network, self.cache = network, cache

    def select(self, rows: Sequence[int]) -> None:
        device = next(self._network.parameters()).device
        self._network.select_cache_rows(self.cache, torch.tensor(rows, device=device))

    def hidden(self, new: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        return self._network({"input_ids": _rectangle(new, device)}, self.cache)[:, -1]


class _Single:
    """A cache for each row, for networks that only know rows of one length."""

    def __init__(self, network: Network, caches: list[Any]):
        self._network, self._caches = network, caches

    def select(self, rows: Sequence[int]) -> None:
        used: set[int] = set()
        caches = []
        for row in rows:
            caches.append(copy.deepcopy(self._caches[row]) if row in used else self._caches[row])
            used.add(row)
        self._caches = caches

    def hidden(self, new: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        found = [
            self._network({"input_ids": _rectangle([ids], device)}, cache)[:, -1]
            for ids, cache in zip(new, self._caches, strict=True)
        ]
        return torch.cat(found)


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device, behind: bool = False) -> Tensor:
    """Returns rows as one tensor (B, T), the shorter ones filled with token 0 in front or behind."""
    length = max(len(ids) for ids in rows)
    fill = [[0] * (length - len(ids)) for ids in rows]
    whole = [[*ids, *pad] if behind else [*pad, *ids] for ids, pad in zip(rows, fill, strict=True)]
    return torch.tensor(whole, device=device)
