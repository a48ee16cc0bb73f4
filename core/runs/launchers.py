"""Whether as many processes were launched as a run is made for: by torchrun, SLURM, by hand or by Lightning."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import Trainer

from core.selection import Selected


def faults(outline: Trainer, selected: list[Selected]) -> Iterator[str]:
    """Yields a line where the launched processes are not those that the run is made for.

    Args:
        outline: A trainer with the run's numbers of devices and machines.
        selected: What the run selected; a cluster environment among it knows better.
    """
    yield from _launched_otherwise(outline.num_devices * outline.num_nodes)
    yield from _not_launched(outline, selected)


def _launched_otherwise(processes: int) -> Iterator[str]:
    # Lightning looks only where it launches by itself: each process would train the whole, alone.
    name = "WORLD_SIZE" if TorchElasticEnvironment.detect() else "SLURM_STEP_NUM_TASKS"
    launched = os.environ.get(name) if name == "WORLD_SIZE" or SLURMEnvironment.detect() else None
    if launched and not launched.isdecimal():
        yield f"{name} is {launched!r} in the environment, not a number of processes"
    elif launched and int(launched) != processes:
        yield (
            f"{launched} processes were launched, --trainer.devices x --trainer.num_nodes is {processes}: "
            f"give them the launcher's numbers, on one machine --trainer.devices={launched}"
        )


def _not_launched(outline: Trainer, selected: list[Selected]) -> Iterator[str]:
    # Lightning would wait for the other machines' processes for ever.
    environment = outline._accelerator_connector.cluster_environment
    chosen = any(isinstance(i.target, type) and issubclass(i.target, ClusterEnvironment) for i in selected)
    by_hand = "MASTER_ADDR" in os.environ and {"NODE_RANK", "GROUP_RANK"} & set(os.environ)
    nodes, each = outline.num_nodes, outline.num_devices
    if nodes > 1 and isinstance(environment, LightningEnvironment) and not (chosen or by_hand):
        yield (
            f"trainer.num_nodes is {nodes}, but nothing launched this run on other machines. On each of them: "
            f"torchrun --nnodes={nodes} --nproc_per_node={each} --node_rank=N --master_addr=HOST -m core ...; "
            f"in a SLURM script: srun --nodes={nodes} --ntasks-per-node={each} python -m core ..."
        )
