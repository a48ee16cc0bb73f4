"""Optimizers that step this rank's shards of weights as tensors of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.training.shards import local_tensors
from toolkit.shards import gradient_like, is_sharded


class StepsOwnShards:
    """Steps the shard that each rank has as a parameter of its own; put it before an optimizer that needs no other weights.

    States are kept for the shards; in the state dict they are DTensors.
    """

    param_groups: list[dict[str, Any]]
    state: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Performs a step; shards are stepped as tensors of their own."""
        base: Any = super()
        if not is_sharded(self.all_parameters()):
            return base.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.on_own_shards():
            base.step()
        return loss

    @contextmanager
    def on_own_shards(self) -> Iterator[None]:
        """Within, the groups have this rank's shards in the place of the parameters, in the same memory."""
        groups, states, parameters = self.param_groups, self.state, self.all_parameters()
        own = {id(p): own_shard(p) for p in parameters}
        kept = {own[id(p)]: states[p] for p in parameters if p in states or p.grad is not None}
        self.state = defaultdict(dict, kept)
        self.param_groups = [{**group, "params": [own[id(p)] for p in group["params"]]} for group in groups]
        try:
            yield
        finally:
            for group, stepped in zip(groups, self.param_groups, strict=True):
                group.update({**stepped, "params": group["params"]})
            self.param_groups, self.state = groups, states
        for parameter in parameters:
            [place], stepped = local_tensors([parameter]), own[id(parameter)]
            if stepped.data_ptr() != place.data_ptr():  # bitsandbytes made it contiguous
                place.copy_(stepped)

    def all_parameters(self) -> list[Any]:
        """Returns the parameters of all groups, in their order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def sharded_states(self, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Returns the states of this rank's shards by the numbers of the parameters, as DTensors."""
        parameters = self.all_parameters()
        return {
            number: {name: self.with_mesh(name, value, parameters[number]) for name, value in own.items()}
            for number, own in state.items()
        }

    def with_mesh(self, name: str, value: Any, parameter: Any) -> Any:
        """Returns a value of the state of this rank's shard, as a DTensor if it is shaped as the shard."""
        if not isinstance(value, Tensor) or value.ndim == 0 or not is_sharded([parameter]):
            return value
        return (
            shard_of(parameter.shape, value, parameter)
            if value.shape == parameter.to_local().shape
            else value
        )


def own_shard(parameter: Any) -> Any:
    """Returns this rank's shard as a parameter, in the same memory; `parameter` itself if it is not sharded."""
    if not is_sharded([parameter]):
        return parameter
    own: Any = nn.Parameter(local_tensors([parameter.detach()])[0], requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        own.grad = local_tensors([gradient_like(parameter)])[0]
    own.shard_of = parameter
    return own


def shard_of(shape: torch.Size, own: Tensor, parameter: Any) -> Tensor:
    """Returns a DTensor of a shape, of which `own` is this rank's shard, sharded as the parameter."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
