"""Networks that an objective runs beside the one that is trained, and that nothing trains, such as a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from core.contracts import Network
from toolkit.initial_values import Start

__all__ = ["FrozenNetwork", "KeepsFrozenNetwork"]


class FrozenNetwork(NamedTuple):
    """A network that is not trained, and not part of checkpoints.

    Attributes:
        network: On the meta device, in eval mode, none of its parameters with `requires_grad`.
        starts: Name -> how a parameter or buffer begins, of all that it has. Of a `LazyTensor` each rank reads its part.
    """

    network: Network
    starts: Mapping[str, Start]


@runtime_checkable
class KeepsFrozenNetwork(Protocol):
    """An objective with a frozen network that is none of its submodules.

    A strategy that shards the network in training asks for this one before the first step. It shards it over the ranks that
    have different tokens, block by block, and fills it; the object stays the same. Within `loss` the objective may then
    call it once, without gradients, and afterwards, until backward is over, use its weights outside of blocks, such as the head.
    Every rank calls it in every micro-batch, or none does.
    """

    def frozen_network(self, network: Network) -> FrozenNetwork:
        """Returns the network to shard; called on every rank, in the precision's context for building networks.

        Args:
            network: The one that is trained.
        """
