"""Steps of optimizers that need whole matrices, on weights that are sharded over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from core.training.shards import full_tensor
from toolkit.shards import is_sharded


@torch.no_grad()
def step_whole(optimizer: Optimizer, step: Callable[[], Any], closure: Any = None) -> Any:
    """Steps parameter by parameter, each gathered with its gradient and its state; called on every rank.

    Args:
        optimizer: Its parameters may be sharded; its states are sharded afterwards as `placed_like` does.
        step: Steps the parameters in `optimizer.param_groups` as a single process does.
        closure: Computes the loss, as for `torch.optim.Optimizer.step`.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups, states = optimizer.param_groups, optimizer.state
    try:
        for group in groups:
            before = dict(group)  # a group may count its steps: one for all its parameters
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                whole = nn.Parameter(full_tensor(parameter.detach()))
                whole.grad = full_tensor(parameter.grad)
                state = tree_map_only(Tensor, full_tensor, dict(states.get(parameter, {})))
                own = {**before, "params": [whole]}
                optimizer.param_groups, optimizer.state = [own], defaultdict(dict, {whole: state})
                step()
                parameter.copy_(placed_like(parameter, whole.detach()))
                states[parameter] = placed_like(parameter, optimizer.state[whole])
                group.update({name: value for name, value in own.items() if name != "params"})
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    return loss


def placed_like(parameter: Any, state: Any) -> Any:
    """Returns nested values with each matrix sharded over the ranks of a parameter.

    A tensor of the parameter's shape is sharded as it is; another by its rows. Vectors, and all where the parameter is not
    sharded, stay as they are.
    """
    if not is_sharded([parameter]):
        return state
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    rows = [place if place.is_replicate() else Shard(0) for place in parameter.placements]

    def place(tensor: Tensor) -> Tensor:
        places = parameter.placements if tensor.shape == parameter.shape else rows
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=places)
        if tensor.ndim < 2 and tensor.shape != parameter.shape:
            return tensor
        return distribute_tensor(tensor, parameter.device_mesh, places, src_data_rank=None)

    return tree_map_only(Tensor, place, state)
