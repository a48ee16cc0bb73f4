"""Proofs for schedules of the learning rate."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from core.contracts import Schedule

STEPS, SAVED = 200, 70
PEAKS = (0.5, 0.01)


def start(case: Case, length: int = STEPS) -> tuple[Optimizer, LRScheduler]:
    """Builds an optimizer of two groups and the schedule over so many steps, as a run does."""
    optimizer = SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": peak} for peak in PEAKS])
    schedule = case.build("model.lr_scheduler", Callable[[Optimizer], LRScheduler])(optimizer)
    if isinstance(schedule, Schedule):
        schedule.bind(length)
    return optimizer, schedule


def rates(optimizer: Optimizer, schedule: LRScheduler, first: int, last: int) -> list[tuple[float, ...]]:
    """Returns the rates of the optimizer steps [first, last), of both groups; makes those steps."""
    found = []
    for _ in range(first, last):
        found.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return found


@proof("schedules")
def rates_are_sound(case: Case) -> None:
    """Every rate of a run of 200 steps is finite and not negative, and not all are 0."""
    found = rates(*start(case), 0, STEPS)
    for number, pair in enumerate(found):
        require(all(math.isfinite(rate) and rate >= 0 for rate in pair), f"step {number} has {pair}")
    require(any(max(pair) > 0 for pair in found), "all rates are 0")


@proof("schedules")
def groups_keep_their_ratio(case: Case) -> None:
    """Groups with peaks of their own keep them: the rates are factors on what the optimizer was given."""
    for number, (one, other) in enumerate(rates(*start(case), 0, STEPS)):
        require(
            math.isclose(one * PEAKS[1], other * PEAKS[0], rel_tol=1e-9, abs_tol=1e-15),
            f"step {number}: rates {one:g} and {other:g} for peaks {PEAKS[0]:g} and {PEAKS[1]:g}",
        )


@proof("schedules")
def resumes_its_rates(case: Case) -> None:
    """A schedule that resumes from a saved state gives the rates of one that was not interrupted."""
    expected = rates(*start(case), 0, STEPS)[SAVED:]
    optimizer, schedule = start(case)
    rates(optimizer, schedule, 0, SAVED)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    optimizer, schedule = start(case)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    if isinstance(schedule, Schedule):
        schedule.bind(STEPS)
    found = rates(optimizer, schedule, SAVED, STEPS)
    wrong = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    require(
        not wrong,
        f"step {SAVED + (wrong or [0])[0]}: {found[(wrong or [0])[0]]} resumed, "
        f"{expected[(wrong or [0])[0]]} otherwise",
    )


@proof("schedules")
def bind_tells_it_the_length(case: Case) -> None:
    """`bind` in mid-run gives the rates of the new length from there on, as if it had been bound to it at the start."""
    optimizer, schedule = start(case, length=2 * STEPS)
    if not isinstance(schedule, Schedule):
        raise NotProvable("it is no core.contracts.Schedule: nothing sets the length of the run")
    rates(optimizer, schedule, 0, SAVED)
    schedule.bind(STEPS)
    found, expected = rates(optimizer, schedule, SAVED, STEPS), rates(*start(case), 0, STEPS)[SAVED:]
    require(
        found == expected,
        f"bound to {2 * STEPS} steps, and after {SAVED} to {STEPS}, it goes on with {found[0]}, not {expected[0]}",
    )
