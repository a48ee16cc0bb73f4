"""What the networks whose tokens choose experts offer, and what listens to the choice: losses, balancing, statistics.

Shapes: N tokens, E experts, k experts a token, L layers with experts, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from toolkit.further_blocks import counterparts
from toolkit.sampled_steps import in_training_forward

__all__ = ["RoutesTokens", "Routing", "all_routers", "count_experts", "count_loads", "recorded"]


class Routing(NamedTuple):
    """Which experts the tokens of one layer go to.

    Attributes:
        logits: The router's scores, (N, E).
        probabilities: Scores that sum to 1 over the experts, (N, E): a softmax, or sigmoids over their sum.
        experts: Indexes of the chosen experts, (N, k).
        weights: What their outputs are multiplied with, (N, k).
        kept: Which choices an expert has room for, (N, k); None: all.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    weights: Tensor
    kept: Tensor | None = None


@runtime_checkable
class RoutesTokens(Protocol):
    """A network whose tokens choose experts.

    Attributes:
        routers: Modules that return a :class:`Routing`, one for each layer with experts, in order. Their `weight` is
            (E, C). Where they choose by scores plus a bias, that is the buffer `e_score_correction_bias` (E,).
        expert_stacks: For each of these layers the module that holds its experts. Dimension 0 of every parameter is
            that of the experts; called with tokens (n, C) sorted by expert and the number of each expert's
            (E,), it returns (n, C). It takes parameters that are sharded over experts, as `core.training.shards`
            does, with the tokens and numbers of the experts that this rank holds.
    """

    @property
    def routers(self) -> Sequence[nn.Module]:
        """See above."""

    @property
    def expert_stacks(self) -> Sequence[nn.Module]:
        """See above."""


def all_routers(network: RoutesTokens) -> list[nn.Module]:
    """Returns the routers of the network, then those of the copies of its last block; see `toolkit.further_blocks`."""
    return [*network.routers, *counterparts(network, network.routers)]


def count_experts(network: RoutesTokens) -> int:
    """Returns E, the number of experts of a layer."""
    weight: Any = network.routers[0].weight
    return int(weight.shape[0])


def _is_backward() -> bool:
    # activation checkpointing computes forward again in there, and routers must not count twice
    return bool(torch._C._current_graph_task_id() >= 0)


def _listen(routers: Sequence[nn.Module], heard: Callable[[int, Routing], None]) -> list[Any]:
    """Calls `heard` with the layer's index and what its router returned; returns handles to remove the hooks by."""

    def hook(index: int) -> Callable[[nn.Module, Any, Routing], None]:
        def forward_hook(module: nn.Module, inputs: Any, routing: Routing) -> None:
            if not _is_backward():
                heard(index, routing)

        return forward_hook

    return [router.register_forward_hook(hook(index)) for index, router in enumerate(routers)]


@contextmanager
def recorded(network: RoutesTokens) -> Iterator[list[Routing]]:
    """Collects what :func:`all_routers` return within the context, in the order of their calls."""
    found: list[Routing] = []
    handles = _listen(all_routers(network), lambda index, routing: found.append(routing))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def count_loads(network: RoutesTokens, loads: Tensor, dropped: Tensor) -> list[Any]:
    """Counts, in training, how many tokens choose each expert, without waiting for the device.

    What activation checkpointing computes again is not counted twice, and what a pipeline computes for shapes alone not at all.

    Args:
        network: Its L routers, those that :func:`all_routers` returns, are listened to.
        loads: (L, E) to add the choices to.
        dropped: (L,) to add those to that found no room.

    Returns:
        Handles of the hooks.
    """
    routers = all_routers(network)

    def count(index: int, routing: Routing) -> None:
        if not in_training_forward(routers[index]) or routing.experts.is_meta:
            return
        chosen = routing.experts.detach().flatten()
        loads[index].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=loads.dtype))
        if routing.kept is not None:
            dropped[index] += (~routing.kept).sum()

    return _listen(routers, count)
