"""Figures as sums over tokens, kept on the device until their means are logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from math import exp
from typing import Any

import torch
from torch import Tensor

from core.contracts import Objective, TokenSum

__all__ = ["TokenSums"]


class TokenSums:
    """Adds up figures by name without waiting for the device; gives weighted means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._tokens: Tensor | None = None

    def add(self, figures: Mapping[str, TokenSum]) -> None:
        """Adds each figure's total and weight, and the number of tokens of "loss"."""
        for name, figure in figures.items():
            if name in self._sums:
                self._sums[name][0].add_(figure.total.detach())
                self._sums[name][1].add_(figure.weight.detach())
            else:
                self._sums[name] = (to_float64(figure.total.detach()), to_float64(figure.weight.detach()))
        if (loss := figures.get("loss")) is not None:
            tokens = loss.tokens.detach()
            self._tokens = to_float64(tokens) if self._tokens is None else self._tokens.add_(tokens)

    def copy(self) -> TokenSums:
        """Returns sums of their own that are the same now."""
        return deepcopy(self)

    def means(self, reduce: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], int]:
        """Returns the means and the number of tokens behind "loss", and starts again at zero.

        Args:
            reduce: Sums a tensor over the ranks.
        """
        *values, count = reduce(self._flat()).tolist()  # the one wait for the device
        pairs = dict(zip(self._sums, zip(values[::2], values[1::2], strict=True), strict=True))
        self._sums, self._tokens = {}, None
        means = {name: total / (weight if weight > 0 else 1) for name, (total, weight) in pairs.items()}
        return means, round(count)

    def state_dict(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Returns the sums of every rank, (ranks, 2 x figures) in `gather`'s order, and their tokens, (ranks,)."""
        flat = torch.atleast_2d(gather(self._flat())).cpu()
        return {"names": list(self._sums), "sums": flat[:, :-1].clone(), "tokens": flat[:, -1].clone()}

    def load_state_dict(
        self, state: Mapping[str, Any], rank: int, world_size: int, device: torch.device
    ) -> None:
        """Takes this rank's sums; at another world size rank 0 takes all."""
        sums, names = state["sums"].to(device), state["names"]
        tokens = state.get("tokens")
        if tokens is None:  # of a checkpoint from when every token weighed 1
            tokens = sums[:, 2 * names.index("loss") + 1] if names else sums.new_zeros(len(sums))
        flat = torch.cat((sums, tokens.to(sums)[:, None]), 1)
        own = flat[rank] if len(flat) == world_size else flat.sum(0) * (rank == 0)
        self._sums = {name: (own[2 * i].clone(), own[2 * i + 1].clone()) for i, name in enumerate(names)}
        self._tokens = to_float64(own[-1])  # older checkpoints have float32 where there are no figures

    def _flat(self) -> Tensor:
        """Returns total and weight of each figure, and last the number of tokens."""
        tensors = [tensor for pair in self._sums.values() for tensor in pair]
        none = torch.zeros_like(tensors[0]) if tensors else to_float64(torch.zeros(()))
        return torch.stack([*tensors, none if self._tokens is None else self._tokens])


def to_float64(value: Tensor) -> Tensor:
    """Returns a copy in the widest type that the device has."""
    # exact for counts up to 2**53; Apple's GPUs have no float64
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)


def named(stage: str, of: Objective, means: dict[str, float], more: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of an objective, and more, under the names that they are logged by; the perplexity where there is one."""
    shown = {"perplexity": exp(min(means["loss"], 700.0))} if means and of.loss_unit == "nats/token" else {}
    return {f"{stage}/{key}": float(value) for key, value in (of.summary(means) | more | shown).items()}
