"""Initial weights from another seed, in a run that has begun."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from core.lightning_compat import collect_rng_states, set_rng_states
from core.training.network_changes import apply_network_changes
from core.training.shards import reshard
from toolkit.initial_values import DrawsWeights, named
from toolkit.shards import HoldsParts, copy_to_shard
from toolkit.snapshots import HoldsWeights

__all__ = ["begin"]


def begin(trainer: Trainer, seed: int) -> None:
    """Gives the network the weights that it would have been initialised with from this seed; called on every rank.

    What its objective adds for it begins anew, too. Where each rank draws its shards, they are drawn again. Otherwise it is built
    once more, in the strategy's contexts, and the values of rank 0 are copied into the weights of the first.
    """
    module: Any = trainer.lightning_module
    seed_everything(seed, verbose=False)
    module.seed = seed
    if isinstance(trainer.strategy, DrawsWeights) and trainer.strategy.draw_weights():
        return
    with (
        trainer.strategy.tensor_init_context(),
        trainer.strategy.model_sharded_context(),
        trainer.precision_plugin.module_init_context(),
    ):
        new = _built_again(module, trainer)
    random, strategy = collect_rng_states(), trainer.strategy
    put = strategy.put_weight if isinstance(strategy, HoldsParts) else copy_to_shard
    reshard(module)
    own = dict(named(module))
    device, main = trainer.strategy.root_device, trainer.is_global_zero
    for name, value in new.items():
        value = value.detach().to(device) if main else torch.empty_like(value, device=device)
        if trainer.world_size > 1:
            dist.broadcast(value, 0)
        if name in own:  # of a pipeline's stages each has some
            put(own[name], value)
    if isinstance(strategy, HoldsWeights):
        strategy.weights_restored()
    set_rng_states(random)


def _built_again(module: Any, trainer: Trainer) -> dict[str, Tensor]:
    """Returns the tensors of a new network, and of what an objective adds for it, by their names in the module."""
    trained = module.objective
    module.objective = copy.deepcopy(
        trained
    )  # the parameters of the first are those that the optimizer steps
    try:
        before = {id(tensor) for _, tensor in named(module.objective)}
        network = apply_network_changes(module.build_network(), trainer)
        found = {f"network.{name}": tensor for name, tensor in named(network)}
        added = ((n, tensor) for n, tensor in named(module.objective) if id(tensor) not in before)
        return {**found, **{f"objective.{name}": tensor for name, tensor in added}}
    finally:
        module.objective = trained
