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

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The first name where torch has it: the second one warns from 2.14 on."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are exchanged in buckets of about this size."""


@dataclass
class Turn:
    """Which of the micro-batches of a step the ranks compute now, one on each.

    Attributes:
        step: Counts optimizer steps; new sums begin when it changes.
        number: Counts the backward passes of a step.
        idle: Whether none is left for this rank, so that its gradients are not added.
    """

    step: int = 0
    number: int = 0
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


def add_in_order(total: Tensor, own: Tensor, group: Any = None, received: Tensor | None = None) -> None:
    """Adds this rank's part of the ranks' tensors to `total`, one after the other, in the order of the ranks.

    A reduce-scatter adds in an order that depends on the number of ranks. This one takes as many bytes.

    Args:
        total: (n,), this rank's part of the sum; changed in place.
        own: (ranks * n,), what this rank adds to the parts of all ranks.
        group: The ranks; None: all.
        received: Memory for what the others send, as large as `own`; None: it is allocated.
    """
    received = torch.empty_like(own) if received is None else received
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

    Each rank keeps its part of the sums until the step is complete. A parameter that nothing used has the gradient `NOTHING`:
    to ask all ranks whether it should be None would make each step wait for the device.

    Args:
        parameters: Those that are trained, the same on each rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._ranks = dist.get_world_size()
        self._buckets = _buckets(self.parameters)
        self._totals = [bucket[0].new_empty(-(-_numbers(bucket) // self._ranks)) for bucket in self._buckets]
        largest: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for total in self._totals:
            kind = total.dtype, total.device
            if kind not in largest or len(total) > len(largest[kind]):
                largest[kind] = total
        self._rooms = {kind: total.new_empty(2, len(total) * self._ranks) for kind, total in largest.items()}

    def begin(self) -> None:
        """Begins a step."""
        for total in self._totals:
            total.fill_(NOTHING)

    @torch.no_grad()
    def add(self, idle: bool) -> None:
        """Adds the gradients of one micro-batch of each rank, and sets them to None; called on every rank.

        Args:
            idle: Whether this rank had none.
        """
        for bucket, total in zip(self._buckets, self._totals, strict=True):
            own, received = self._rooms[total.dtype, total.device][:, : len(total) * self._ranks]
            begin = 0
            for parameter in bucket:
                room = own[begin : begin + parameter.numel()]
                begin += parameter.numel()
                if idle or parameter.grad is None:
                    room.fill_(NOTHING)
                else:
                    room.view_as(parameter).copy_(parameter.grad)
                parameter.grad = None
            own[begin:].fill_(NOTHING)
            add_in_order(total, own, received=received)

    @torch.no_grad()
    def finish(self) -> None:
        """Gives each parameter the sum of its gradients; called on every rank."""
        for bucket, total in zip(self._buckets, self._totals, strict=True):
            whole = total.new_empty(len(total) * self._ranks)
            _gather(whole, total)
            begin = 0
            for parameter in bucket:
                parameter.grad = whole[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns parameters of one data type and device each, of about BUCKET_BYTES together."""
    found: list[list[nn.Parameter]] = []
    kind, size = None, 0
    for parameter in parameters:
        own = parameter.dtype, parameter.device
        if own != kind or size >= BUCKET_BYTES:
            found.append([])
            kind, size = own, 0
        found[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return found
