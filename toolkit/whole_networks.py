"""Running the network in training as each rank likes: with all weights of a sharded one, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer

from core.contracts import RunsAsForward
from core.training.loss_ranks import dp_group, dp_rank, dp_size
from toolkit.evaluation_results import Ranks
from toolkit.shards import GathersNetworks

if TYPE_CHECKING:
    from toolkit.selection import Run

__all__ = ["as_forward", "gathered", "ranks_of", "sharding_faults"]

T = TypeVar("T")

SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
"""Strategies under which ranks with different tokens need each other's weights, and which cannot gather them once."""

WHOLE = (
    "ranks generate texts of different lengths, for which each needs all weights: take --trainer.strategy=DDP, FSDP, "
    "DeepSpeedZero with stage 1 or 2, or HybridParallel with tensor, data_shard and data_replicate alone and loss_parallel=false"
)

TOGETHER = (
    "ranks see texts of different lengths, for which each group needs all weights: take --trainer.strategy=DDP, FSDP, "
    "DeepSpeedZero with stage 1 or 2, or HybridParallel without sequence, context and expert"
)


def sharding_faults(run: Run, together: bool = False) -> Iterator[str]:
    """Yields an error for each strategy of a run under which ranks cannot have all weights for a while.

    Args:
        run: The run.
        together: Whether ranks with the same tokens call the network together, always within :func:`gathered`: then they may be
            those of a pipeline, or have a part of the vocabulary each.
    """
    for item in run.selected:
        cuts = item.name == "DeepSpeedZero" and item.arguments.get("stage") == 3
        if (
            cuts
            or item.name in SHARDING
            or (item.name == "HybridParallel" and _splits(item.arguments, together))
        ):
            yield f"{item.name} shards the network, and {TOGETHER if together else WHOLE}"


def _splits(sizes: Mapping[str, Any], together: bool) -> bool:
    """Returns whether HybridParallel of these sizes splits up more than weights, and what ranks can call together."""
    vocabulary = (sizes.get("tensor") or 1) > 1 and sizes.get("loss_parallel", True)
    kinds = ("sequence", "context", "expert", *(() if together else ("pipeline",)))
    return bool((vocabulary and not together) or any((sizes.get(name) or 1) > 1 for name in kinds))


def gathered(trainer: Trainer, network: Any) -> AbstractContextManager[Any]:
    """Context with all weights of a network on each rank, where the strategy shards them; within :func:`as_forward`.

    Ranks of a pipeline call the network together, and each has what the full network returns.
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
    """Returns the ranks with different tokens, which share the items of evaluations."""
    return Ranks(dp_rank(trainer), dp_size(trainer), lambda value: _gather(trainer, value))


def _gather(trainer: Trainer, value: Any) -> list[Any]:
    if dp_size(trainer) == 1:
        return [value]
    found: list[Any] = [None] * dp_size(trainer)
    torch.distributed.all_gather_object(found, value, group=dp_group(trainer))
    return found
