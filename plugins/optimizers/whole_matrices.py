"""Steps of optimizers that need whole matrices, on weights that are sharded over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import (
    MappingKey,
    keystr,
    tree_leaves_with_path,
    tree_map_only,
    tree_map_with_path,
)

from core.training.shards import full_tensor, local_tensors
from plugins.optimizers.matrix_owners import Owners, rounds
from toolkit.shards import gradient_like, is_sharded

GRADIENT = keystr((MappingKey("gradient"),))
"""Name of the gradient, which no step changes."""


@torch.no_grad()
def step_whole(optimizer: Optimizer, step: Callable[[], Any], closure: Any = None) -> Any:
    """Steps each parameter as a whole, with its gradient and its state; called on every rank.

    Of as many sharded matrices as there are ranks, each rank gets one, steps it, and sends the shards back. Vectors, and all in the
    first step, which makes the states, are gathered and stepped on each rank.

    Args:
        optimizer: Its parameters may be sharded; its states are sharded afterwards as `placed_like` does. Of the states only
            tensors change; numbers that change are in the groups.
        step: Steps the parameters in `optimizer.param_groups` as a single process does, also where there are none.
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
            given = [p for p in group["params"] if p.grad is not None]
            shared = [p for p in given if p.ndim > 1 and states.get(p) and is_sharded([p])]
            divided = set(shared)
            for parameter in given:
                if parameter in divided:
                    continue
                whole = nn.Parameter(full_tensor(parameter.detach()))
                whole.grad = full_tensor(parameter.grad)
                state = tree_map_only(Tensor, full_tensor, dict(states.get(parameter, {})))
                state = _stepped(optimizer, step, before, whole, state)
                parameter.copy_(placed_like(parameter, whole.detach()))
                states[parameter] = placed_like(parameter, state)
            for owners, numbers in rounds(shared):
                some = [shared[number] for number in numbers]
                _step_round(optimizer, step, before, owners.own, {p: dict(states[p]) for p in some})
            own = {**before, "params": []}
            optimizer.param_groups, optimizer.state = [own], defaultdict(dict)
            step()
            group.update({name: value for name, value in own.items() if name != "params"})
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    return loss


def _stepped(
    optimizer: Optimizer, step: Callable[[], Any], group: Mapping[str, Any], whole: nn.Parameter, state: Any
) -> Any:
    """Steps one parameter with its gradient; returns its state."""
    optimizer.param_groups = [{**group, "params": [whole]}]
    optimizer.state = defaultdict(dict, {whole: state})
    step()
    return optimizer.state[whole]


def _step_round(
    optimizer: Optimizer,
    step: Callable[[], Any],
    group: Mapping[str, Any],
    own: int,
    states: Mapping[Any, Any],
) -> None:
    """Steps parameters, of which the n-th is owned by the n-th rank, in place; called on every rank.

    Args:
        optimizer: See :func:`step_whole`.
        step: See there.
        group: Of the parameters, as before the step.
        own: The number of the parameter that this rank owns.
        states: Parameter -> its state, not empty.
    """
    trees = [
        {"value": p.detach(), "gradient": gradient_like(p), "state": state} for p, state in states.items()
    ]
    tensors = _alike(trees)
    whole: dict[str, Tensor] = {}
    for name, owners, found in tensors:
        owned = owners.to_owners(*_shards(found))
        if owned is not None:
            whole[name] = owned
    result: dict[str, Tensor] = {}
    if own < len(trees):
        tree = tree_map_with_path(lambda path, leaf: whole.get(keystr(path), leaf), trees[own])
        value = nn.Parameter(tree["value"])
        value.grad = tree["gradient"]
        state = _stepped(optimizer, step, group, value, tree["state"])
        stepped = {"value": value.detach(), "state": state}
        result = {keystr(path): leaf for path, leaf in tree_leaves_with_path(stepped)}
    for name, owners, found in tensors:
        if name != GRADIENT:
            shards, shapes = _shards(found)
            some = next(iter(shards.values()))
            owned = result[name] if own in found else None
            for number, shard in owners.from_owners(owned, shapes, some.dtype, some.device).items():
                shards[number].copy_(shard)


def _alike(trees: Sequence[Any]) -> list[tuple[str, Owners, dict[int, Any]]]:
    """Returns the tensors of nested values by name, those of one kind together: number of the nested value -> tensor."""
    found: dict[Any, dict[int, Any]] = {}
    for number, tree in enumerate(trees):
        for path, leaf in tree_leaves_with_path(tree):
            if hasattr(leaf, "placements"):
                kind = keystr(path), leaf.device_mesh, leaf.placements, leaf.dtype
                found.setdefault(kind, {})[number] = leaf
    return [(name, Owners(mesh, places), some) for (name, mesh, places, _), some in found.items()]


def _shards(found: Mapping[int, Any]) -> tuple[dict[int, Tensor], dict[int, torch.Size]]:
    local = local_tensors(found.values())
    return dict(zip(found, local, strict=True)), {number: tensor.shape for number, tensor in found.items()}


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
