"""What techniques do with tensors that may be sharded over ranks (DTensors); see also `core.training.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = [
    "GathersNetworks",
    "HoldsParts",
    "ReadsItself",
    "RunsBackward",
    "SharesItems",
    "SplitsTokens",
    "copy_to_shard",
    "gradient_like",
    "is_sharded",
]


@runtime_checkable
class GathersNetworks(Protocol):
    """A strategy that shards networks over ranks and can gather all weights of one for a while."""

    def gathered(self, network: nn.Module) -> AbstractContextManager[Any]:
        """Gathers the weights of a network once: within, each rank runs it as often as it likes, without the others.

        Called on every rank, within `core.contracts.RunsAsForward.run_as_forward`, without gradients.
        """


@runtime_checkable
class SharesItems(Protocol):
    """A strategy some of whose ranks call a gathered network together, with the same batches, though they train on different ones."""

    def item_share(self) -> tuple[int, int]:
        """Returns which share of the items of an evaluation this rank measures, and how many shares there are."""


@runtime_checkable
class SplitsTokens(Protocol):
    """A strategy under which the network may be called with some tokens of each row, and those of other ranks beside.

    Attributes:
        row_documents: `document_ids` (B, T) of the rows that are computed, where the network has them not; else None.
    """

    row_documents: Tensor | None

    def all_tokens(self, own: Tensor, dim: int = 1) -> Tensor:
        """Returns the values of all tokens in order, given those of this rank's in a dimension, without gradients.

        Called by all ranks that share the rows.
        """


@runtime_checkable
class HoldsParts(Protocol):
    """A strategy that keeps weights and gradients in tensors of its own, where parameters do not show them: DeepSpeed ZeRO.

    Each element is on one rank. Weights are those that are trained.
    """

    def weight_parts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns this rank's part of each weight, flat and possibly empty; no copies."""

    def gradient_parts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns this rank's part of each gradient, for `on_before_optimizer_step`; flat and possibly empty."""

    def put_weight(self, tensor: Tensor, value: Tensor) -> None:
        """Writes this rank's part of a weight or buffer, given the whole; called on every rank.

        The network has it after `weights_restored` of `toolkit.snapshots.HoldsWeights`, once for all.
        """


@runtime_checkable
class RunsBackward(Protocol):
    """A strategy whose engine runs backward and keeps the gradients, such as DeepSpeed's."""

    def run_backward(self, loss: Tensor) -> None:
        """Runs backward without telling callbacks of it; called on every rank."""


@runtime_checkable
class ReadsItself(Protocol):
    """A tensor of a sharded checkpoint that has not been read, as callbacks find it in their states."""

    def read_into(self, target: Tensor) -> None:
        """Reads it into a tensor of its shape, or this rank's shard into a DTensor."""


def is_sharded(tensors: Sequence[Tensor]) -> bool:
    """Returns whether any of the tensors is sharded over ranks."""
    return torch.distributed.is_initialized() and any(hasattr(tensor, "to_local") for tensor in tensors)


def gradient_like(parameter: Any) -> Any:
    """Returns the gradient of a parameter, sharded as the parameter: ranks may have partial sums of it."""
    gradient = parameter.grad
    placements = getattr(parameter, "placements", None)
    if gradient is None or placements is None or gradient.placements == placements:
        return gradient
    return gradient.redistribute(placements=placements)


def copy_to_shard(target: Tensor, value: Tensor | ReadsItself) -> None:
    """Copies a tensor, or this rank's shard of it, into a tensor that may be sharded over ranks.

    Args:
        target: A tensor, or a DTensor.
        value: The full tensor, this rank's shard of it, a DTensor that is sharded as the target is, or a stored tensor.
    """
    if isinstance(value, ReadsItself):
        value.read_into(target)
        return
    own: Any = target
    with torch.no_grad():
        if hasattr(own, "to_local") and not hasattr(value, "to_local"):
            value = value.to(device=target.device, dtype=target.dtype)
            if value.shape != own.to_local().shape:
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
            else:
                own = own.to_local()
        own.copy_(value)
