"""Sums of gradients over ranks in the order in which one process adds its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.training.shards import full_tensor

__all__ = ["NOTHING", "OrderedSums", "SumsInOrder", "Turn", "add_in_order", "norm_of_full"]

NOTHING = -0.0
"""What is added in place of a gradient that is not there: unlike +0.0 it changes no value, not even -0.0."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are exchanged in buckets of about this size."""


@dataclass
class Turn:
    """Which of the micro-batches of a step the ranks compute now, one on each.

    Attributes:
        step: Counts optimizer steps; new sums begin when it changes.
        idle: Whether none is left for this rank, so that its gradients are not added.
    """

    step: int = 0
    idle: bool = False


@runtime_checkable
class SumsInOrder(Protocol):
    """A strategy that shards gradients, and can add those of the ranks in a fixed order."""

    def sum_in_order(self, turn: Turn) -> None:
        """Adds from now on, in each backward, the gradients of rank 0, 1, 2... to those of the step, undivided.

        Gradients are None before each backward, and afterwards the sums of the step so far. `gradient_norm` then gives
        the norm of the full gradients, as one process computes it.

        Args:
            turn: Changed by the caller before each backward.
        """


def add_in_order(total: Tensor, own: Tensor, group: Any = None) -> None:
    """Adds this rank's part of the ranks' tensors to `total`, one after the other, in the order of the ranks.

    A reduce-scatter adds in an order that depends on the number of ranks. This one takes as many bytes.

    Args:
        total: (n,), this rank's part of the sum; changed in place.
        own: (ranks * n,), what this rank adds to the parts of all ranks.
        group: The ranks; None: all.
    """
    received = torch.empty_like(own)
    dist.all_to_all_single(received, own, group=group)
    for part in received.view(-1, len(total)):
        total += part


def norm_of_full(gradients: Iterable[Tensor]) -> Tensor:
    """Returns the 2-norm of gradients that may be sharded, by the operations of one process; called on every rank.

    Each is gathered in turn: a rank never holds more than one of them in full.
    """
    norms = [torch._foreach_norm([full_tensor(gradient)])[0] for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


class OrderedSums:
    """Sums the gradients of parameters that every rank has in full.

    Each rank keeps its part of the sums until the step is complete.

    Args:
        parameters: Those that are trained, the same on each rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._ranks = dist.get_world_size()
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8, device=self.parameters[0].device)
        self._buckets = _buckets(self.parameters)
        self._totals: list[Tensor] = []

    def begin(self) -> None:
        """Begins a step."""
        self._totals = []
        self._used.zero_()

    @torch.no_grad()
    def add(self, idle: bool) -> None:
        """Adds the gradients of one micro-batch of each rank, and sets them to None; called on every rank.

        Args:
            idle: Whether this rank had none.
        """
        for number, bucket in enumerate(self._buckets):
            own = torch.cat([self._flat(index, idle) for index in bucket])
            size = -(-len(own) // self._ranks)
            own = nn.functional.pad(own, (0, size * self._ranks - len(own)), value=NOTHING)
            if number == len(self._totals):
                self._totals.append(own.new_full((size,), NOTHING))
            add_in_order(self._totals[number], own)

    def _flat(self, index: int, idle: bool) -> Tensor:
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if idle or gradient is None:
            return parameter.new_full((parameter.numel(),), NOTHING)
        self._used[index] = 1
        return gradient.flatten()

    @torch.no_grad()
    def finish(self) -> None:
        """Gives each parameter the sum of its gradients, or None where no micro-batch had one; called on every rank."""
        dist.all_reduce(self._used, op=dist.ReduceOp.MAX)
        used = self._used.tolist()
        for bucket, total in zip(self._buckets, self._totals, strict=True):
            whole = total.new_empty(len(total) * self._ranks)
            dist.all_gather_into_tensor(whole, total)
            begin = 0
            for parameter in (self.parameters[index] for index in bucket):
                parameter.grad = whole[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()
        for index, parameter in enumerate(self.parameters):
            if not used[index]:
                parameter.grad = None
        self._totals = []


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Returns the numbers of parameters of one data type and device each, of about BUCKET_BYTES together."""
    found: list[list[int]] = []
    kind, size = None, 0
    for index, parameter in enumerate(parameters):
        own = parameter.dtype, parameter.device
        if own != kind or size >= BUCKET_BYTES:
            found.append([])
            kind, size = own, 0
        found[-1].append(index)
        size += parameter.numel() * parameter.element_size()
    return found
