"""Holds the techniques that a run selected against each other before anything is started."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from core import API_VERSION, catalog
from core.errors import ConfigError
from core.selection import Run, Selected
from core.technique import Declaration, declaration_of

T = TypeVar("T")

CLIPPING = "trainer.gradient_clip_val"
MESSAGE_PROBLEMS = 8
TRIAL_PROCESSES = 8
"""So many processes are let run on however few cores: enough to try out any combination of strategies."""


def check(run: Run, *faults: str) -> None:
    """Raises one ConfigError with every problem of a run, the `faults` that are already known among them."""
    checks: tuple[Callable[[Run], Iterator[str]], ...] = (
        _versions, _needs, _processes, _conflicts, _duplicates, _owners, _circles, _arguments,
    )  # fmt: skip
    lines = [*faults, *(line for kind in checks for line in kind(run))]
    problems = [" ".join(line.split()) for line in lines]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        more = len(problems) - MESSAGE_PROBLEMS
        shown = problems[:MESSAGE_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
        raise ConfigError(
            "\n".join([f"This selection cannot run, {count}:", *(f"- {line}" for line in shown)])
        )


def _versions(run: Run) -> Iterator[str]:
    for item in run.selected:
        wanted = item.declaration.api or ""
        if wanted and (mend := catalog.upgrade(wanted, API_VERSION, item.package)):
            who = run.named(item) + (f" of {item.package} {item.version}" if item.kind != "-" else "")
            yield f"{who} was written for core API {wanted}, this is {API_VERSION}: {mend}"


def _needs(run: Run) -> Iterator[str]:
    for item in run.selected:
        for need in item.declaration.needs:
            if missing := need.missing(run):
                yield f"{run.named(item)}: {missing}"


def _processes(run: Run) -> Iterator[str]:
    most = max(os.cpu_count() or 1, TRIAL_PROCESSES)
    if run.accelerator == "cpu" and run.devices > most:
        yield (
            f"{run.devices} processes on {os.cpu_count()} cores would fill the memory and wait for each other: "
            f"set --trainer.devices to {most} or less"
        )


def _conflicts(run: Run) -> Iterator[str]:
    by_name, told = {item.name: item for item in run.selected}, set()
    for item in run.selected:
        for other, reason in item.declaration.conflicts.items():
            pair = frozenset((item.name, other))
            if other in by_name and pair not in told:  # both may have declared it
                told.add(pair)
                both = [item, by_name[other]]
                out = " or ".join(f"--callbacks.-{one.name}" for one in both if _is_callback(one))
                names = " and ".join(map(run.named, both))
                yield f"{names} exclude each other, keep one{f' ({out})' if out else ''}: {reason}"


def _is_callback(item: Selected) -> bool:
    return re.fullmatch(r"trainer\.callbacks(\.\d+)?", item.key) is not None


def _duplicates(run: Run) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for item in filter(_is_callback, run.selected):
        places.setdefault(item.name, []).append(run.place(item.key))
    for name, found in places.items():
        if len(found) > 1:
            where = f" ({', '.join(filter(None, found))})" if any(found) else ""
            yield f"{name} stands {len(found)} times in trainer.callbacks{where}; keep one."


def _owners(run: Run) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for item in run.selected:
        implied = ("learning_rate",) if item.key == "model.lr_scheduler" else ()
        for owned in dict.fromkeys((*implied, *item.declaration.owns)):
            owners.setdefault(owned, []).append(run.named(item))
    if run.argument(CLIPPING):
        place = run.place(CLIPPING) or "its default"
        owners.setdefault("gradient_clipping", []).append(f"{CLIPPING} ({place}; =null turns it off)")
    for owned, names in owners.items():
        if len(names) > 1:
            yield f"{' and '.join(names)} would both control the {owned.replace('_', ' ')}; keep one."


def _circles(run: Run) -> Iterator[str]:
    items = [item for item in run.selected if _is_callback(item)]
    _, circle = _sorted([item.name for item in items], [item.declaration for item in items])
    if circle:
        yield _circle([run.named(items[index]) for index in circle])


def _arguments(run: Run) -> Iterator[str]:
    for item in run.selected:
        judge = getattr(item.target, "preflight", None)
        if inspect.ismethod(judge):  # a classmethod; whatever else bears this name is not meant
            yield from (f"{run.named(item)}: {line}" for line in judge(run, item))


def ordered(callbacks: Sequence[T]) -> list[T]:
    """Returns the callbacks so that every declared `before` and `after` holds, else in the given order.

    Raises:
        ConfigError: If the declarations form a circle.
    """
    names = [type(callback).__name__ for callback in callbacks]
    declared = [declaration_of(type(callback)) or Declaration(paper="") for callback in callbacks]
    order, circle = _sorted(names, declared)
    if circle:
        raise ConfigError(_circle([names[index] for index in circle]))
    return [callbacks[index] for index in order]


def _circle(names: Sequence[str]) -> str:
    return f"{', '.join(names)} ask to come before each other in a circle; take one out of trainer.callbacks."


def _sorted(names: Sequence[str], declared: Sequence[Declaration]) -> tuple[list[int], list[int]]:
    """Returns the indexes in an order that holds, and those that stand in the way of one: none, or a circle."""

    def precedes(first: int, second: int) -> bool:
        return names[second] in declared[first].before or names[first] in declared[second].after

    waiting, order = list(range(len(names))), []
    while free := [i for i in waiting if not any(precedes(j, i) for j in waiting if j != i)]:
        order.append(free[0])
        waiting.remove(free[0])
    while last := [i for i in waiting if not any(precedes(i, j) for j in waiting if j != i)]:
        waiting = [i for i in waiting if i not in last]  # these wait for the circle and are no part of it
    return order, waiting
