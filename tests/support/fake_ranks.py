"""One rank of many in this process: its peers are those of torch's fake process group, which sends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.contracts import Network, Objective
from core.language_module import LanguageModule
from plugins.objectives.causal_lm import CausalLM
from plugins.strategies.mesh_strategy import MeshStrategy

MACHINE = 8
"""Ranks of a machine, at most."""


class OneOfMany(LightningEnvironment):
    """A rank that something else has launched."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world, self._here = rank, world, min(world, MACHINE)

    creates_processes_externally = True

    def world_size(self) -> int:
        return self._world

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank % self._here

    def node_rank(self) -> int:
        return self._rank // self._here


@contextmanager
def shards(
    build: Callable[[], Network],
    strategy: MeshStrategy,
    rank: int,
    world: int,
    resumed: bool = False,
    objective: Objective | None = None,
    weights: str | None = None,
    **options: Any,
) -> Iterator[LanguageModule]:
    """Yields the module of one rank behind the strategy's `setup`, whose network began with seed 0.

    Args:
        build: Builds the network.
        strategy: A new one.
        rank: Of the rank.
        world: How many there are.
        resumed: Whether a checkpoint is going to be read; it is not.
        objective: None: `CausalLM`.
        weights: What it starts from; rank 0 alone gets its tensors.
        options: Of the trainer.
    """
    here = min(world, MACHINE)
    seed_everything(0, verbose=False)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=here,
            num_nodes=world // here,
            strategy=strategy,
            plugins=[OneOfMany(rank, world)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        module = LanguageModule(build, objective or CausalLM(), torch.optim.SGD, weights=weights)
        module.trainer = trainer
        trainer.ckpt_path = "step.ckpt" if resumed else None
        strategy.connect(module)
        strategy.setup_environment()
        with strategy.tensor_init_context(), trainer.precision_plugin.module_init_context():
            module.configure_model()
        strategy.setup(trainer)
        yield module
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its meshes have the place of this rank, and are equal to those of others
        os.environ.pop("LOCAL_RANK", None)
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # of this process, which `setup_environment` has set
