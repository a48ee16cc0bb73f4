"""Running the network in training as each rank likes: with all weights of a sharded one, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer

from core.contracts import RunsAsForward
from core.training.loss_ranks import dp_group, dp_rank, dp_size
from toolkit.evaluation_results import Ranks
from toolkit.shards import GathersNetworks, SharesItems

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

__all__ = ["as_forward", "gathered", "ranks_of", "sharding_faults"]

T = TypeVar("T")

SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
"""Strategies of Lightning: ranks with different tokens need each other's weights, and these cannot gather them for a while."""

WHOLE = (
    "ranks generate texts of different lengths, for which each needs all weights: take --trainer.strategy=DDP, FSDP, "
    "DeepSpeedZero with stage 1 or 2, or HybridParallel with tensor, data_shard and data_replicate alone and loss_parallel=false"
)

TOGETHER = (
    "its ranks need each other's weights for texts of different lengths: take --trainer.strategy=DDP, FSDP, DeepSpeedZero or "
    "HybridParallel"
)

CALLED_TOGETHER = ("sequence", "context", "expert", "pipeline")
"""Sizes of HybridParallel under which ranks call the network together."""


def sharding_faults(run: Run, together: bool = False) -> Iterator[str]:
    """Yields an error for each strategy of a run under which ranks cannot run the whole network.

    Args:
        run: The run.
        together: Whether ranks that share items, as `ranks_of` says, call the network together, always within :func:`gathered`.
            Otherwise each calls it as often as it likes, for which it needs all weights.
    """
    for item in run.selected:
        if item.name in SHARDING or (not together and _needs_others(item)):
            yield f"{item.name} shards the network, and {TOGETHER if together else WHOLE}"


def _needs_others(item: Selected) -> bool:
    """Returns whether a rank cannot call the network without others."""
    given = item.arguments
    if item.name == "DeepSpeedZero":
        return bool(given.get("stage") == 3)
    if item.name != "HybridParallel":
        return False
    vocabulary = (given.get("tensor") or 1) > 1 and given.get("loss_parallel", True)
    return bool(vocabulary or any((given.get(name) or 1) > 1 for name in CALLED_TOGETHER))


def gathered(trainer: Trainer, network: Any) -> AbstractContextManager[Any]:
    """Context with all weights of a network on each rank, where the strategy shards them; within :func:`as_forward`.

    Ranks that share items, see :func:`ranks_of`, call the network together, and each has what the full network returns.
    """
    strategy = trainer.strategy
    return strategy.gathered(network) if isinstance(strategy, GathersNetworks) else nullcontext()


def as_forward(trainer: Trainer, pl_module: Any, name: str, function: Callable[[], T]) -> T:
    """Calls a function that runs the network, without gradients, in place of the module's forward; on every rank.

    Args:
        trainer: The trainer.
        pl_module: Its module, which has the function under a name meanwhile.
        name: The name; not one that the module has.
        function: What is called.
    """
    strategy = trainer.strategy
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        if not isinstance(strategy, RunsAsForward):
            return function()
        vars(pl_module)[name] = function
        try:
            return cast(T, strategy.run_as_forward(name))
        finally:
            del vars(pl_module)[name]


def ranks_of(trainer: Trainer) -> Ranks:
    """Returns the ranks that share the items of evaluations: those with different tokens, but for ranks that need each other."""
    strategy = trainer.strategy
    share = (
        strategy.item_share() if isinstance(strategy, SharesItems) else (dp_rank(trainer), dp_size(trainer))
    )
    return Ranks(*share, lambda value: _gather(trainer, *share, value), lambda fault: _agree(trainer, fault))


def _agree(trainer: Trainer, fault: str) -> str:
    if trainer.world_size == 1:
        return fault
    found = [""] * trainer.world_size
    torch.distributed.all_gather_object(found, fault)
    return next(filter(None, found), "")


def _gather(trainer: Trainer, number: int, shares: int, value: Any) -> list[Any]:
    if shares == 1:
        return [value]
    found: list[Any] = [None] * dp_size(trainer)
    torch.distributed.all_gather_object(found, (number, value), group=dp_group(trainer))
    of_share = dict(found)  # those that call the network together have the same
    return [of_share[number] for number in range(shares)]
