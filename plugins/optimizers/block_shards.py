"""Optimizers with 8-bit states in blocks of elements, on weights that are sharded over ranks."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from core.training.shards import local_tensors
from plugins.optimizers.own_shards import StepsOwnShards, shard_of
from toolkit.shards import is_sharded

BLOCK = 256
"""Elements with one scale, in bitsandbytes and torchao."""
LEAST = 4096
"""Elements of a tensor from which its states have 8 bits, in both."""


class StepsShards(StepsOwnShards):
    """Steps the shard that each rank has, with the blocks that a single process would have; put it before one of bitsandbytes.

    Where shards do not consist of whole blocks, the states of this tensor are kept in float32. Checkpoints are those of a
    single process, which goes on in float32 where they are.
    """

    args: Any

    def init_state(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
        """Makes the states of a parameter, with 8 bits if it has whole blocks."""
        usual = self.args.min_8bit_size
        if (parameter := getattr(p, "shard_of", None)) is not None:
            self.args.min_8bit_size = 0 if has_blocks(parameter) else sys.maxsize
        super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        self.args.min_8bit_size = usual

    def with_mesh(self, name: str, value: Any, parameter: Any) -> Any:
        """Returns a value of the state of this rank's shard, as a DTensor if it is one per element or block."""
        if name.startswith("absmax"):
            return scales_of(value, parameter)
        return super().with_mesh(name, value, parameter) if name.startswith("state") else value

    def load_state_dict(self, state_dict: dict[str, Any], **how: Any) -> None:
        """Loads the states of full tensors, or of shards that the strategy has cut from them."""
        parameters = self.all_parameters()
        state = {number: _own_states(own, parameters[number]) for number, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state}, **how)  # type: ignore[misc]


def has_blocks(parameter: Any) -> bool:
    """Returns whether the states have 8 bits: each rank has whole blocks of the flattened parameter."""
    ranks = 1
    if is_sharded([parameter]):
        for place, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if place.is_replicate():
                continue
            if not place.is_shard(0):
                return False
            ranks *= size
    rows, rest = divmod(parameter.shape[0], ranks) if parameter.ndim else (1, 0)
    whole = rows * math.prod(parameter.shape[1:]) % BLOCK == 0
    return not rest and whole and parameter.numel() >= LEAST


def scales_of(scales: Tensor, parameter: Any) -> Tensor:
    """Returns the scales of this rank's blocks as a DTensor, if the parameter is sharded."""
    if not is_sharded([parameter]):
        return scales
    return shard_of(torch.Size([parameter.numel() // BLOCK]), scales, parameter)


def own_scales(scales: Tensor, parameter: Any) -> Tensor:
    """Returns the scales of this rank's blocks, of those of all blocks or of its own; both if it has whole blocks."""
    if len(scales) * BLOCK != parameter.numel() or not is_sharded([parameter]):
        return scales
    return scales[_blocks(parameter).flatten()[::BLOCK].to(scales.device)]


def own_values(codes: Tensor, scales: Tensor, qmap: Tensor, parameter: Any) -> Tensor:
    """Returns the values of this rank's shard, of which `codes` are and `scales` are of all blocks."""
    blocks = _blocks(parameter).to(scales.device)
    return qmap.to(codes.device)[codes.int()] * scales[blocks].to(codes.device)


def _own_states(own: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Returns the states of this rank's shard; in float32 where it has no whole blocks."""
    if not is_sharded([parameter]):
        return own
    found = {name: local_tensors([v])[0] if isinstance(v, Tensor) else v for name, v in own.items()}
    for number in ("1", "2"):
        if (scales := found.pop(f"absmax{number}", None)) is None:
            continue  # in float32, or Lion, which has one state
        qmap, state = found.pop(f"qmap{number}"), f"state{number}"
        if has_blocks(parameter):
            found |= {f"absmax{number}": own_scales(scales, parameter), f"qmap{number}": qmap}
        else:
            found[state] = own_values(found[state], scales, qmap, parameter)
    return found


def _blocks(parameter: Any) -> Tensor:
    """Returns the block of each element of this rank's shard, in the flattened parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not is_sharded([parameter]):
        return torch.arange(parameter.numel()).view(parameter.shape) // BLOCK
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    found = torch.zeros(sizes, dtype=torch.int64)
    for dim, (size, start) in enumerate(zip(sizes, offsets, strict=True)):
        step = math.prod(parameter.shape[dim + 1 :])
        index = torch.arange(start, start + size) * step
        found += index.view(-1, *[1] * (len(sizes) - dim - 1))
    return found // BLOCK
