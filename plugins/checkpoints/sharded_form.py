"""What of a checkpoint are tensors, which ranks write in shards, and the rest, which the first one writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

from torch import Tensor

WEIGHTS = {"state_dict", "weights_in_training"}
"""Sections of weights; the second one beside an average of them."""
ORDER = "state_dict_order"
"""Key in `state.pt`: the names of all weights, in the order of the model."""


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of model and optimizers by key, and the checkpoint without them.

    So are sharded tensors in the states of callbacks.

    Args:
        checkpoint: The checkpoint of a single process, or the part of one rank. Keys of `optimizer_states` are the
            indices of the full model's parameters.
    """
    weights = checkpoint["state_dict"]
    tensors: dict[str, Tensor] = {
        f"{section}.{name}": value.detach()
        for section in WEIGHTS
        for name, value in checkpoint.get(section, {}).items()
        if isinstance(value, Tensor)
    }
    optimizers = []
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        plain: dict[int, dict[str, Any]] = {}
        for number, values in optimizer["state"].items():
            plain[number] = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer_states.{index}.{number}.{name}"] = value.detach()
                else:
                    plain[number][name] = value
        optimizers.append({**optimizer, "state": plain})
    rest = {**checkpoint, "state_dict": {n: v for n, v in weights.items() if not isinstance(v, Tensor)}}
    if "weights_in_training" in checkpoint:
        rest["weights_in_training"] = {}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = optimizers
    if "callbacks" in checkpoint:
        rest["callbacks"] = _without_shards(checkpoint["callbacks"], [], tensors)
    return tensors, {**rest, ORDER: list(weights)}


def _without_shards(state: Any, path: list[str | int], tensors: dict[str, Tensor]) -> Any:
    """Returns nested states of callbacks without the tensors that are sharded, which are added to `tensors`."""
    if type(state) is not dict:
        return state
    kept = {}
    for name, value in state.items():
        if not isinstance(name, str | int):
            kept[name] = value
        elif hasattr(value, "to_local"):
            tensors[f"callbacks.{json.dumps([*path, name])}"] = value.detach()
        else:
            kept[name] = _without_shards(value, [*path, name], tensors)
    return kept


def join(tensors: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint that :func:`split` divided; changes `rest`."""
    order = rest.pop(ORDER, [])
    weights = rest["state_dict"]
    for key, value in tensors.items():
        section, _, name = key.partition(".")
        if section in WEIGHTS:
            rest[section][name] = value
            continue
        if section == "callbacks":
            *path, last = json.loads(name)
            reduce(getitem, path, rest["callbacks"])[last] = value
            continue
        index, number, name = name.split(".", 2)
        state = rest["optimizer_states"][int(index)]["state"]
        state.setdefault(int(number), {})[name] = value
    for optimizer in rest.get("optimizer_states", ()):
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    rest["state_dict"] = {
        name: weights[name] for name in dict.fromkeys([*order, *weights]) if name in weights
    }
    return rest
