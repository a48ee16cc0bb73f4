"""What differs first between two runs: by their records, and within a step that was replayed for both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from toolkit.hash_chains import FOLDER, Chain

FEW = 16
"""Elements up to which single weights or tokens are named as the cause."""

ROUNDING = 2.0**-10
"""Norm of the difference of all gradients, over their norm, up to which another order of a reduction can be the cause; a
rounding is 2**-24 of a value in float32, and sums of opposite signs raise it. Single tensors tell less: where the gradient is 0
but for rounding, as that of the bias of keys, all of it differs."""

STAGES = ("before", "batch", "outputs", "gradients", "after")
"""What a step computes, each from what is before it."""


@dataclass
class Difference:
    """The first difference of two runs.

    Attributes:
        step: Optimizer step, from 1; 0: before the first one.
        stage: One of `STAGES`, or "loss" or "weights", where only the records tell.
        rank: The rank.
        names: Tensors or modules that differ, the first one first.
        lines: What is known of them, in words.
        elements: How many elements differ, where tensors were compared.
        relative: Norm of the differences over that of all values, where tensors were compared.
    """

    step: int
    stage: str
    rank: int = 0
    names: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    elements: int = 0
    relative: float = 0.0


def first_recorded(a: Mapping[int, Chain], b: Mapping[int, Chain]) -> tuple[Difference | None, int]:
    """Returns the first difference between the records of two runs, and the last step before with equal weights.

    Raises:
        ConfigError: If they have not as many ranks, or networks with other modules.
    """
    if a.keys() != b.keys():
        raise ConfigError(
            f"The runs have {len(a)} and {len(b)} ranks, which sum in other orders: bisect compares runs on as many."
        )
    found: Difference | None = None
    for rank, chain in a.items():
        if chain.groups != b[rank].groups:
            raise ConfigError(
                "The networks of the runs have other modules: `config diff` shows what differs."
            )
        own = _first_of_rank(chain, b[rank], rank)
        if own is not None and (found is None or own.step < found.step):
            found = own
    end = found.step if found else max((max(c.steps, default=0) for c in a.values()), default=0)
    equal = [
        step
        for step in a[0].steps
        if step < end
        and all(c.weights(step) is not None and c.weights(step) == b[r].weights(step) for r, c in a.items())
    ]
    return found, max(equal, default=0)


def _first_of_rank(a: Chain, b: Chain, rank: int) -> Difference | None:
    for step in sorted(a.steps.keys() & b.steps.keys()):
        for name in ("batch", "loss"):
            one, other = a.steps[step].get(name), b.steps[step].get(name)
            if one is not None and other is not None and one != other:
                return Difference(step, name, rank)
        weights, others = a.weights(step), b.weights(step)
        if weights is not None and others is not None and weights != others:
            return Difference(step, "weights", rank, [k for k in weights if weights[k] != others[k]])
    return None


def common_steps(a: Mapping[int, Chain], b: Mapping[int, Chain]) -> int:
    """Returns how many steps both runs have recorded."""
    return len(a[0].steps.keys() & b[0].steps.keys() - {0}) if 0 in a and 0 in b else 0


def first_in_detail(a: Mapping[int, Chain], b: Mapping[int, Chain]) -> Difference | None:
    """Returns the first difference within the steps that were replayed for both runs."""
    found: list[Difference] = []
    for rank, chain in a.items():
        other = b[rank]
        for step in sorted(chain.steps.keys() & other.steps.keys()):
            one, two = chain.steps[step].get("detail"), other.steps[step].get("detail")
            if one is None or two is None:
                continue
            if own := _within(step, rank, chain.steps[step], other.steps[step]):
                found.append(own)
                break
    return min(found, key=lambda each: (each.step, STAGES.index(each.stage)), default=None)


def _within(step: int, rank: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference | None:
    one, two = a["detail"], b["detail"]
    for stage in STAGES:
        if stage == "batch":
            names = ["batch"] if a["batch"] != b["batch"] else []
        elif stage == "outputs":
            names = [x[0] for x, y in zip(one[stage], two[stage], strict=False) if x != y]
            if not names and (len(one[stage]) != len(two[stage]) or a["loss"] != b["loss"]):
                names = ["loss"]
        else:
            names = [
                name for name, value in one.get(stage, {}).items() if two.get(stage, {}).get(name) != value
            ]
        if names:
            return Difference(step, stage, rank, names)
    return None


def compare_tensors(found: Difference, a: Path, b: Path) -> None:
    """Adds to a difference which elements of the tensors of its step differ; `a` and `b` are folders of replays."""
    stage = "gradients" if found.stage == "outputs" else found.stage
    one, two = _tensors(a, found.rank, stage), _tensors(b, found.rank, stage)
    differing, squares = [], [0.0, 0.0]
    for name, tensor in one.items():
        other = two.get(name)
        if other is None or other.shape != tensor.shape:
            found.lines.append(
                f"{name}: {list(tensor.shape)} in A, {list(other.shape) if other is not None else 'none'} in B"
            )
            found.elements += tensor.numel()
            continue
        squares[1] += float(tensor.double().square().sum())
        places = (_bytes(tensor) != _bytes(other)).any(1).nonzero()[:, 0]
        if len(places):
            differing.append(name)
            found.elements += len(places)
            squares[0] += float((tensor.double() - other.double()).square().sum())
            for place in places[:2]:
                index = [int(i) for i in torch.unravel_index(place, tensor.shape)]
                values = (t[tuple(index)].item() for t in (tensor, other))
                found.lines.append(f"{name}{index}: {' in A, '.join(map(repr, values))} in B")
    found.relative = math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf
    if found.stage != "outputs":
        found.names = differing or found.names


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of each element, (elements, bytes)."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).view(len(flat), tensor.element_size())


def _tensors(folder: Path, rank: int, stage: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / FOLDER / f"rank{rank}.{stage}.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    """Returns whether two checkpoints have the same weights, bit by bit."""
    from plugins.checkpoints.checkpoint import read_checkpoint

    one, other = (read_checkpoint(path)["state_dict"] for path in (a, b))
    return not any(True for _ in differing_entries(one, other, ""))


def differing_entries(a: Any, b: Any, place: str) -> Iterator[str]:
    """Yields the places where two nested states differ, with the values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        if not same or not torch.equal(_bytes(a), _bytes(b)):
            yield place
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            yield from differing_entries(a.get(key), b.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differing_entries(one, other, f"{place}[{index}]")
    elif type(a) is not type(b) or a != b:
        yield f"{place}: {a!r:.40} in A, {b!r:.40} in B"
