"""Sums of squares over weights that are sharded over ranks, or that several ranks have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.training.shards import local_tensors
from toolkit.shards import HoldsParts, gradient_like

__all__ = ["ShardedSquares"]


class ShardedSquares:
    """Sums squares over groups of weights, so that the sum over all ranks is that of the full model.

    Each rank adds the squares of its shards, divided by the number of ranks that have the same ones. Where each rank has
    values of its own for a weight that all have, such as gradients that are not yet averaged, the sum over ranks is
    the mean of theirs.

    Args:
        groups: Name of a group -> name -> parameter, of this rank; a weight may be in several.
        device: Of the sums.
        strategy: The run's, which may keep weights and gradients where parameters do not show them.

    Attributes:
        groups: Names of the groups of all ranks, in the order of the sums: a stage of a pipeline has only its own.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, nn.Parameter]],
        device: torch.device,
        strategy: object = None,
    ) -> None:
        own = {name: parameter for group in groups.values() for name, parameter in group.items()}
        self._parameters = list(own.values())
        self._holder = strategy if isinstance(strategy, HoldsParts) else None
        elements = {
            name: (local.numel(), parameter.numel())
            for (name, parameter), local in zip(own.items(), local_tensors(own.values()), strict=True)
        }
        self.groups, copies = _agree(list(groups), elements)
        if self._holder is not None:
            copies = dict.fromkeys(copies, 1.0)
        wide = torch.float32 if device.type == "mps" else torch.float64
        shares = torch.zeros(len(self.groups), len(own), dtype=wide)
        places = {name: index for index, name in enumerate(own)}
        for row, group in enumerate(self.groups):
            for name in groups.get(group, ()):
                shares[row, places[name]] = 1 / copies[name]
        self._shares = shares.to(device)

    def weights(self) -> list[Tensor]:
        """Returns this rank's shards of the weights, in order; no copies."""
        if self._holder is not None:
            return self._holder.weight_parts(self._parameters)
        return [weight.detach() for weight in local_tensors(self._parameters)]

    def gradients(self) -> list[Tensor | None]:
        """Returns this rank's shards of the gradients, in the order of the weights."""
        if self._holder is not None:
            return [*self._holder.gradient_parts(self._parameters)]
        found = [gradient_like(parameter) for parameter in self._parameters]
        return [None if gradient is None else local_tensors([gradient])[0] for gradient in found]

    def sums(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Returns this rank's part of the sum of squares of each group, (groups,); None counts as zeros.

        Args:
            tensors: A shard for each weight, in order.
        """
        there = [(index, tensor) for index, tensor in enumerate(tensors) if tensor is not None]
        squares = self._shares.new_zeros(len(tensors))
        if there:
            wide = any(tensor.dtype == torch.float64 for _, tensor in there)
            dtype = torch.float64 if wide else torch.float32
            norms = torch._foreach_norm([tensor for _, tensor in there], 2, dtype)
            index = torch.tensor([index for index, _ in there], device=squares.device)
            squares[index] = torch.stack(norms).to(squares).square()
        return self._shares @ squares


def _agree(groups: list[str], elements: dict[str, tuple[int, int]]) -> tuple[list[str], dict[str, float]]:
    """Returns the groups of all ranks, and on how many ranks each element of a weight is.

    Args:
        groups: This rank's groups: a stage of a pipeline has only its blocks.
        elements: Name of a weight -> how many elements this rank has, and how many there are.
    """
    found: list[Any] = [(groups, elements)]
    if dist.is_available() and dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (groups, elements))
    everywhere = list(dict.fromkeys(group for own, _ in found for group in own))
    held: dict[str, int] = {}
    for _, own in found:
        for name, (local, _) in own.items():
            held[name] = held.get(name, 0) + local
    return everywhere, {name: held[name] / max(whole, 1) for name, (_, whole) in elements.items()}
