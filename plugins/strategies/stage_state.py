"""Checkpoints of a pipeline: joins the states of the stages to that of the full model, and splits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from core.errors import ConfigError


def collect(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the objects of all ranks of a pipeline on its first rank, an empty list on the others."""
    found: list[Any] = [None] * dist.get_world_size(group)
    first = dist.get_process_group_ranks(group)[0]
    main = dist.get_rank(group) == 0
    dist.gather_object(own, found if main else None, first, group=group)
    return found if main else []


def joined(states: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Returns the weights of all stages in the order of the full model."""
    weights = {name: weight for state in reversed(states) for name, weight in state.items()}
    return {name: weights[name] for name in order if name in weights}


def names_of(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Returns the names of the parameters in each group of an optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def numbered(names: Sequence[Sequence[Sequence[str]]], order: Sequence[str]) -> list[dict[str, int]]:
    """Returns name -> index of each parameter in the optimizer of the full model, group by group.

    Args:
        names: Names of the parameters: per stage, per group.
        order: Names of the full model's parameters, in order.

    Raises:
        ConfigError: If the stages differ in their groups.
    """
    if len({len(groups) for groups in names}) > 1:
        raise ConfigError(
            f"HybridParallel: the stages have {[len(groups) for groups in names]} parameter groups; each stage "
            "has to have the same, for one checkpoint to hold them."
        )
    places, number, found = {name: index for index, name in enumerate(order)}, 0, []
    for parts in zip(*names, strict=True):
        members = sorted({name for part in parts for name in part}, key=places.__getitem__)
        found.append({name: number + index for index, name in enumerate(members)})
        number += len(members)
    return found


def joined_optimizer(
    parts: Sequence[tuple[Mapping[str, Any], Sequence[Sequence[str]]]], numbers: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Returns the optimizer state of the full model from those of the stages, each given with its names."""
    everywhere = {name: number for group in numbers for name, number in group.items()}
    state: dict[int, Any] = {}
    for stage, names in reversed(parts):
        flat = [name for group in names for name in group]
        state |= {everywhere[flat[index]]: value for index, value in stage["state"].items()}
    first = parts[0][0]["param_groups"]
    groups = [{**group, "params": list(own.values())} for group, own in zip(first, numbers, strict=True)]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def own_part(
    full: Mapping[str, Any], names: Sequence[Sequence[str]], numbers: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Returns the part of the full model's optimizer state that belongs to a stage with these names."""
    everywhere = {name: number for group in numbers for name, number in group.items()}
    flat = [name for group in names for name in group]
    state = {i: full["state"][everywhere[n]] for i, n in enumerate(flat) if everywhere[n] in full["state"]}
    groups, at = [], 0
    for group, members in zip(full["param_groups"], names, strict=True):
        groups.append({**group, "params": list(range(at, at + len(members)))})
        at += len(members)
    return {"state": state, "param_groups": groups}
