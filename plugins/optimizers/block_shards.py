"""bitsandbytes' optimizers with 8-bit states, on weights that are sharded over ranks."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from core.training.shards import local_tensors
from toolkit.shards import gradient_like, is_sharded

BLOCK = 256
"""Elements with one scale, in bitsandbytes."""
LEAST = 4096
"""Elements of a tensor from which its states have 8 bits, in bitsandbytes."""


class StepsShards:
    """Steps the shard that each rank has, with the blocks that a single process would have; put it before the optimizer.

    Where shards do not consist of whole blocks, the states of this tensor are kept in float32. Checkpoints are those of a
    single process, which goes on in float32 where they are.
    """

    param_groups: list[dict[str, Any]]
    state: Any
    args: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Performs a step; shards are stepped as tensors of their own."""
        base: Any = super()
        groups, states = self.param_groups, self.state
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not is_sharded(parameters):
            return base.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = {id(p): _own_shard(p) for p in parameters}
        try:
            self.state = defaultdict(dict, {own[id(p)]: states[p] for p in parameters if p.grad is not None})
            self.param_groups = [
                {**group, "params": [own[id(p)] for p in group["params"]]} for group in groups
            ]
            base.step()
        finally:
            self.param_groups, self.state = groups, states
        for parameter in parameters:
            [place], stepped = local_tensors([parameter]), own[id(parameter)]
            if stepped.data_ptr() != place.data_ptr():  # bitsandbytes made it contiguous
                place.copy_(stepped)
        return loss

    def init_state(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
        """Makes the states of a parameter, with 8 bits if it has whole blocks."""
        usual = self.args.min_8bit_size
        self.args.min_8bit_size = getattr(p, "least_8bit", usual)
        super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
        self.args.min_8bit_size = usual

    def sharded_states(self, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Returns the states of this rank's shards by the numbers of the parameters, as DTensors."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {number: _with_mesh(own, parameters[number]) for number, own in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any], **how: Any) -> None:
        """Loads the states of full tensors, or of shards that the strategy has cut from them."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {number: _own_states(own, parameters[number]) for number, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state}, **how)  # type: ignore[misc]


def _own_shard(parameter: Any) -> Any:
    """Returns this rank's shard as a parameter, in the same memory; `parameter` itself if it is not sharded."""
    if not is_sharded([parameter]):
        return parameter
    own: Any = nn.Parameter(local_tensors([parameter.detach()])[0], requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        own.grad = local_tensors([gradient_like(parameter)])[0]
    own.least_8bit = 0 if _has_blocks(parameter) else sys.maxsize
    return own


def _has_blocks(parameter: Any) -> bool:
    """Returns whether each rank has whole blocks of the flattened parameter."""
    ranks = 1
    for place, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if place.is_replicate():
            continue
        if not place.is_shard(0):
            return False
        ranks *= size
    rows, rest = divmod(parameter.shape[0], ranks)
    whole = rows * math.prod(parameter.shape[1:]) % BLOCK == 0
    return not rest and whole and parameter.numel() >= LEAST


def _with_mesh(own: dict[str, Any], parameter: Any) -> dict[str, Any]:
    if not is_sharded([parameter]):
        return own
    from torch.distributed.tensor import DTensor

    found = dict(own)
    for name, value in own.items():
        if name.startswith(("state", "absmax")):
            is_state = name.startswith("state")
            shape = parameter.shape if is_state else torch.Size([parameter.numel() // BLOCK])
            found[name] = DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=shape,
                stride=parameter.stride() if is_state else (1,),
            )
    return found


def _own_states(own: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Returns the states of this rank's shard; in float32 where it has no whole blocks."""
    if not is_sharded([parameter]):
        return own
    found = {name: local_tensors([v])[0] if isinstance(v, Tensor) else v for name, v in own.items()}
    if "absmax1" not in own:
        return found
    at = _positions(parameter)
    for number in ("1", "2"):
        if (scales := found.pop(f"absmax{number}", None)) is None:
            continue  # Lion has one state
        qmap, codes = found.pop(f"qmap{number}"), found[f"state{number}"]
        blocks = at.div(BLOCK, rounding_mode="floor").to(scales.device)
        if _has_blocks(parameter):
            own_scales = (
                scales[blocks.flatten()[::BLOCK]] if len(scales) * BLOCK == parameter.numel() else scales
            )
            found |= {f"absmax{number}": own_scales, f"qmap{number}": qmap}
        else:
            values = qmap.to(codes.device)[codes.int()]
            found[f"state{number}"] = values * scales[blocks].to(codes.device)
    return found


def _positions(parameter: Any) -> Tensor:
    """Returns the place of each element of this rank's shard in the flattened parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    found = torch.zeros(sizes, dtype=torch.int64)
    for dim, (size, start) in enumerate(zip(sizes, offsets, strict=True)):
        step = math.prod(parameter.shape[dim + 1 :])
        index = torch.arange(start, start + size) * step
        found += index.view(-1, *[1] * (len(sizes) - dim - 1))
    return found
