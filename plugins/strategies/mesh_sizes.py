"""The sizes of a mesh of ranks: whether they fit the run, and the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "expert", "context", "tensor")
"""From the outside inwards: neighbours in the last one exchange most, and lie on the same machine."""


@dataclass(frozen=True)
class MeshSizes:
    """How many ranks each kind of parallelism has; their product is the number of ranks.

    Attributes:
        data_shard: None: what the others leave.
    """

    data_replicate: int
    data_shard: int | None
    tensor: int
    context: int
    pipeline: int
    expert: int

    def of(self, world_size: int) -> dict[str, int]:
        """Returns the sizes by name, the free one filled in."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        if self.data_shard is None:
            rest = math.prod(size for size in sizes.values() if size)
            sizes["data_shard"] = max(world_size // rest, 1)
        return sizes

    def misfits(self, world_size: int) -> Iterator[str]:
        """Yields why so many ranks cannot be dealt out."""
        sizes = self.of(world_size)
        if wrong := next((name for name, size in sizes.items() if size < 1), None):
            yield f"{wrong} is {sizes[wrong]}; sizes are 1 or more"
        elif (product := math.prod(sizes.values())) != world_size:
            told = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every size 1"
            yield (
                f"{told} is {product} ranks, this run has {world_size}: change a size, or --trainer.devices "
                "and --trainer.num_nodes"
            )

    def mesh(self, device: str, world_size: int) -> DeviceMesh:
        """Returns the mesh; called on every rank once they are connected."""
        sizes = self.of(world_size)
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def joined(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Returns some dimensions of a mesh as one."""
    return mesh[names]._flatten("_".join(names)) if len(names) > 1 else mesh[names[0]]


def is_first(mesh: DeviceMesh, *names: str) -> bool:
    """Returns whether this rank is the first one in each of these dimensions."""
    return all(mesh[name].get_local_rank() == 0 for name in names)


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of a mesh of one dimension."""
    group: dist.ProcessGroup = mesh.get_group()
    return group


def pair_group(mesh: DeviceMesh, first: int, last: int) -> dist.ProcessGroup | None:
    """Returns the group of two ranks of this rank's pipeline, or None on another; called on every rank."""
    own = None
    for pair in mesh.mesh[[first, last]].flatten(1).T.tolist():
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            own = group
    return own
