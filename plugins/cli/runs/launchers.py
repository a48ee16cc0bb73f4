"""Launchers: whether as many processes were launched as a run is made for, and SLURM's queue."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from toolkit.selection import Selected


def faults(
    environment: ClusterEnvironment | None, devices: int, nodes: int, selected: list[Selected]
) -> Iterator[str]:
    """Yields a line where the launched processes are not those that the run is made for.

    Args:
        environment: The cluster environment that Lightning detected.
        devices: Processes on each machine.
        nodes: Machines.
        selected: The run's techniques; a cluster environment among them overrides the detected one.
    """
    yield from _launched_otherwise(devices * nodes)
    yield from _not_launched(environment, devices, nodes, selected)


def _launched_otherwise(processes: int) -> Iterator[str]:
    # Lightning checks only the processes that it launches: here each would train the complete run by itself.
    name = "WORLD_SIZE" if TorchElasticEnvironment.detect() else "SLURM_STEP_NUM_TASKS"
    launched = os.environ.get(name) if name == "WORLD_SIZE" or SLURMEnvironment.detect() else None
    if launched and not launched.isdecimal():
        yield f"{name} is {launched!r} in the environment, not a number of processes"
    elif launched and int(launched) != processes:
        yield (
            f"{launched} processes were launched, --trainer.devices x --trainer.num_nodes is {processes}: "
            f"give them the launcher's numbers, on one machine --trainer.devices={launched}"
        )


def _not_launched(
    environment: ClusterEnvironment | None, each: int, nodes: int, selected: list[Selected]
) -> Iterator[str]:
    # Lightning would wait for the processes of the other machines without a limit.
    chosen = any(isinstance(i.target, type) and issubclass(i.target, ClusterEnvironment) for i in selected)
    by_hand = "MASTER_ADDR" in os.environ and {"NODE_RANK", "GROUP_RANK"} & set(os.environ)
    if nodes > 1 and isinstance(environment, LightningEnvironment) and not (chosen or by_hand):
        yield (
            f"trainer.num_nodes is {nodes}, but nothing launched this run on other machines. On each of them: "
            f"torchrun --nnodes={nodes} --nproc_per_node={each} --node_rank=N --master_addr=HOST -m core ...; "
            f"in a SLURM script: srun --nodes={nodes} --ntasks-per-node={each} python -m core ..."
        )


def queue_again() -> None:
    """Puts this SLURM job back into the queue; it resumes from its last checkpoint."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"The job could not be queued again: {error}\nSubmit it again with --ckpt_path last.",
            file=sys.stderr,
        )
