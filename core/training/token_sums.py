"""Figures as sums over tokens on the device, until somebody wants their means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.contracts import TokenSum


class TokenSums:
    """Adds up figures by name without waiting for the device; gives token-weighted means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, figures: Mapping[str, TokenSum]) -> None:
        """Adds each figure's total and its number of tokens."""
        for name, (total, tokens) in figures.items():
            if name in self._sums:
                self._sums[name][0].add_(total.detach())
                self._sums[name][1].add_(tokens)
            else:
                self._sums[name] = (wide(total.detach()), wide(tokens.detach()))

    def copy(self) -> TokenSums:
        """Returns sums of their own that are the same now."""
        other = TokenSums()
        other._sums = {name: (total.clone(), tokens.clone()) for name, (total, tokens) in self._sums.items()}
        return other

    def means(self, reduce: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], int]:
        """Returns the means and the number of tokens behind "loss", and starts again at zero.

        Args:
            reduce: Sums a tensor over the ranks.
        """
        values = reduce(self._flat()).tolist()  # the one wait for the device
        pairs = dict(zip(self._sums, zip(values[::2], values[1::2], strict=True), strict=True))
        self._sums.clear()
        return {name: total / max(tokens, 1) for name, (total, tokens) in pairs.items()}, round(
            pairs["loss"][1]
        )

    def state_dict(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Returns the sums of every rank, (ranks, 2 x figures) in `gather`'s order."""
        return {
            "names": list(self._sums),
            "sums": torch.atleast_2d(gather(self._flat())).cpu(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], rank: int, world_size: int, device: torch.device
    ) -> None:
        """Takes this rank's sums; at another world size rank 0 takes all."""
        sums = state["sums"].to(device)
        own = sums[rank] if len(sums) == world_size else sums.sum(0) * (rank == 0)
        self._sums = {
            name: (own[2 * index].clone(), own[2 * index + 1].clone())
            for index, name in enumerate(state["names"])
        }

    def _flat(self) -> Tensor:
        tensors = [tensor for pair in self._sums.values() for tensor in pair]
        return torch.stack(tensors) if tensors else torch.zeros(0)


def wide(value: Tensor) -> Tensor:
    """Returns a copy in the widest type that the device has."""
    # exact for counts up to 2**53; Apple's GPUs have no float64
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)


def named(stage: str, means: Mapping[str, float]) -> dict[str, float]:
    """Returns the means under the names that they are logged by, the perplexity among them."""
    figures = {f"{stage}/{name}": value for name, value in means.items()}
    figures[f"{stage}/perplexity"] = math.exp(min(means["loss"], 700.0))
    return figures
