"""What techniques do with tensors that may be sharded over ranks (DTensors); see also `core.training.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["GathersNetworks", "copy_to_shard", "is_sharded"]


@runtime_checkable
class GathersNetworks(Protocol):
    """A strategy that shards networks over ranks and can gather all weights of one for a while."""

    def gathered(self, network: nn.Module) -> AbstractContextManager[Any]:
        """Gathers the weights of a network once: within, each rank runs it as often as it likes, without the others.

        Called on every rank, within `core.contracts.RunsAsForward.run_as_forward`, without gradients.
        """


def is_sharded(tensors: Sequence[Tensor]) -> bool:
    """Returns whether any of the tensors is sharded over ranks."""
    return torch.distributed.is_initialized() and any(hasattr(tensor, "to_local") for tensor in tensors)


def copy_to_shard(target: Tensor, value: Tensor) -> None:
    """Copies a full tensor, or this rank's shard of it, into a tensor that may be sharded over ranks."""
    value = value.to(device=target.device, dtype=target.dtype)
    if hasattr(target, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = target
        value = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(value)
