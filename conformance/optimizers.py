"""Proofs for optimizers: progress, weight decay by group, and a state that can be saved and sharded."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from core.technique import declaration_of

STEPS, BETWEEN = 6, 3
QUADRATIC_STEPS = 50
CUT = 10
"""Weights in each piece that flattened matrices are cut into; divides neither their size nor their rows."""
ELEMENTWISE_TOLERANCE = 1e-5
"""Relative: float32, vectorised or not."""


def parameters() -> list[nn.Parameter]:
    """Returns two matrices, as hidden layers have, with values between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.rand(8, 4, generator=generator) + 0.5) for _ in range(2)]


def build(case: Case, groups: Any) -> Optimizer:
    """Builds the optimizer as a run does."""
    optimizer: Optimizer = case.build("model.optimizer", Callable[[Any], Optimizer])(groups)
    return optimizer


def step(optimizer: Optimizer, values: list[nn.Parameter], number: int) -> None:
    """Makes a step on gradients that follow from its number, through a closure as Lightning does."""

    def closure() -> Any:
        generator = torch.Generator().manual_seed(number)
        for value in values:
            value.grad = torch.randn(value.shape, generator=generator)
        return torch.tensor(1.0)

    optimizer.step(closure)


@proof("optimizers")
def lowers_a_quadratic(case: Case) -> None:
    """50 steps on the squares of the weights lower their sum."""
    values = parameters()
    optimizer = build(case, _without_decay(values))
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.stack([value.square().sum() for value in values]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    for _ in range(QUADRATIC_STEPS):
        optimizer.step(closure)
    require(losses[-1] < losses[0], f"from {losses[0]:.4f} to {losses[-1]:.4f}")


@proof("optimizers")
def honours_weight_decay_by_group(case: Case) -> None:
    """A group's `weight_decay` shrinks its weights; a group that has 0 is left alone where gradients are 0."""
    decayed, kept = parameters()
    before = decayed.detach().clone(), kept.detach().clone()
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [kept], "weight_decay": 0.0}]
    optimizer = build(case, groups)
    if "weight_decay" not in optimizer.defaults:
        raise NotProvable("it takes no weight_decay")
    for value in (decayed, kept):
        value.grad = torch.zeros_like(value)
    optimizer.step()
    require(torch.equal(kept, before[1]), "weights of the group with weight_decay 0 changed")
    ratio = float((decayed.detach().abs() / before[0]).max())
    require(ratio < 1, f"weights of the group with weight_decay 0.1 became {ratio} times what they were")


@proof("optimizers")
def its_state_can_be_stored(case: Case) -> None:
    """The state of a parameter is tensors and plain numbers by name, as sharded checkpoints hold it."""
    values = parameters()
    optimizer = build(case, [{"params": values}])
    for number in range(BETWEEN):
        step(optimizer, values, number)
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            require(
                isinstance(name, str) and isinstance(value, Tensor | int | float | bool | None),
                f"{name!r} of a parameter's state is a {type(value).__name__}",
            )
    _saved(optimizer)


@proof("optimizers")
def a_saved_state_goes_on_bitwise(case: Case) -> None:
    """Saved, loaded into a new optimizer and gone on with, it makes the steps that it would have made."""
    values = parameters()
    optimizer = build(case, [{"params": values}])
    for number in range(BETWEEN):
        step(optimizer, values, number)
    copies = [nn.Parameter(value.detach().clone()) for value in values]
    resumed = build(case, [{"params": copies}])
    resumed.load_state_dict(_saved(optimizer))
    for number in range(BETWEEN, STEPS):
        step(optimizer, values, number)
        step(resumed, copies, number)
        for value, copy in zip(values, copies, strict=True):
            apart = float((value - copy).detach().abs().max())
            require(
                torch.equal(value, copy),
                f"{number - BETWEEN + 1} steps after loading, weights are {apart:g} off",
            )


@proof("optimizers")
def elementwise_treats_each_weight_alone(case: Case) -> None:
    """Where it offers "elementwise", a weight's steps do not depend on which weights are in its tensor."""
    declared = declaration_of(case.target)
    if declared is None or "elementwise" not in declared.offers:
        raise NotProvable('it does not offer "elementwise"')
    values = parameters()
    flat = torch.cat([value.detach().flatten() for value in values])
    pieces = [nn.Parameter(piece.clone()) for piece in flat.split(CUT)]
    optimizers = build(case, [{"params": values}]), build(case, [{"params": pieces}])
    for number in range(STEPS):
        gradients = torch.randn(flat.shape, generator=torch.Generator().manual_seed(number))
        for optimizer, own in zip(optimizers, (values, pieces), strict=True):
            sizes = [value.numel() for value in own]
            for value, gradient in zip(own, gradients.split(sizes), strict=True):
                value.grad = gradient.view_as(value).clone()
            optimizer.step()
        one, other = (torch.cat([value.detach().flatten() for value in own]) for own in (values, pieces))
        apart = float(((one - other).abs() / other.abs().clamp(min=1e-3)).max())
        require(
            apart <= ELEMENTWISE_TOLERANCE,
            f"after step {number + 1} the weights of two (8, 4) matrices are {apart:.1e} off those of the same ones as "
            f"vectors of {CUT}.\nLikely: a norm, mean or factor over a whole tensor decides: then the optimizer is not "
            'elementwise, and strategies that flatten weights compute something else: take "elementwise" out of '
            "offers.",
        )


def _saved(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    try:
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # pickle's
        raise AssertionError(f"the state is more than tensors and plain values: {error}") from None
    return loaded


def _without_decay(values: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": values, "weight_decay": 0.0}]
