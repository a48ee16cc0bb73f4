"""The sizes of a mesh of ranks: checks against the run, the mesh, its process groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "expert", "context", "tensor")
"""From outer to inner: ranks of the last dimension communicate most and should be on one machine."""


@dataclass(frozen=True)
class MeshSizes:
    """How many ranks each kind of parallelism has; their product is the number of ranks.

    Attributes:
        data_shard: None: the number of ranks divided by the other sizes.
    """

    data_replicate: int
    data_shard: int | None
    tensor: int
    context: int
    pipeline: int
    expert: int

    def of(self, world_size: int) -> dict[str, int]:
        """Returns the sizes by name, with `data_shard` filled in."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        if self.data_shard is None:
            rest = math.prod(size for size in sizes.values() if size)
            sizes["data_shard"] = max(world_size // rest, 1)
        return sizes

    def compatibility_errors(self, world_size: int) -> Iterator[str]:
        """Yields why the sizes do not fit the number of ranks."""
        sizes = self.of(world_size)
        if wrong := next((name for name, size in sizes.items() if size < 1), None):
            yield f"{wrong} is {sizes[wrong]}; sizes are 1 or more"
        elif (product := math.prod(sizes.values())) != world_size:
            product_of = (
                " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every size 1"
            )
            yield (
                f"{product_of} is {product} ranks, this run has {world_size}: change a size, or --trainer.devices "
                "and --trainer.num_nodes"
            )

    def mesh(self, device: str, world_size: int) -> DeviceMesh:
        """Returns the mesh; called on every rank once the processes are connected."""
        sizes = self.of(world_size)
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def joined(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Returns some dimensions of a mesh flattened to one."""
    return mesh[names]._flatten("_".join(names)) if len(names) > 1 else mesh[names[0]]


def is_first(mesh: DeviceMesh, *names: str) -> bool:
    """Returns whether this rank has index 0 in each of these dimensions."""
    return all(mesh[name].get_local_rank() == 0 for name in names)


def dp_process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of a one-dimensional mesh."""
    group: dist.ProcessGroup = mesh.get_group()
    return group


def pair_group(mesh: DeviceMesh, first: int, last: int) -> dist.ProcessGroup | None:
    """Returns the group of two ranks of this rank's pipeline, or None on other ranks; called on every rank."""
    own: dist.ProcessGroup | None = None
    for pair in mesh.mesh[[first, last]].flatten(1).T.tolist():
        group: Any = dist.new_group(pair)  # annotated by torch with what other ranks get, too
        if dist.get_rank() in pair:
            own = group
    return own
