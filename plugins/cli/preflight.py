"""Checks the selected techniques, and whether they can run together, before anything is started."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from core import API_VERSION, catalog
from core.contracts import ChecksRun
from core.errors import ConfigError
from core.technique import Declaration, declaration_of
from plugins.cli.configuration.class_names import kinds_of
from toolkit.selection import Run, Selected

T = TypeVar("T")

TRAINERS_OWN = (
    ("gradient_clipping", "trainer.gradient_clip_val", 0, "null"),
    ("gradient_accumulation", "trainer.accumulate_grad_batches", 1, "1"),
)
"""Options of the trainer that own something: its name, the option, its neutral value, how to turn it off."""
LEAST = {
    "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.gradient_clip_val": 0,
    "trainer.log_every_n_steps": 1,
}
"""Least values of options that Lightning does not check, or checks only during the run."""
MOST = {"trainer.max_steps": 10**12}
"""Greatest values: above them arithmetic with times and rates overflows. At 1 ms a step, 10**12 steps take 30 years."""
MESSAGE_PROBLEMS = 8
TRIAL_PROCESSES = 8
"""Processes on CPUs that are allowed with any number of cores: enough to try any combination of strategies."""


def check(run: Run, *faults: str) -> None:
    """Raises one ConfigError with every problem of a run, after the `faults` that were found before."""
    checks: tuple[Callable[[Run], Iterator[str]], ...] = (
        _versions,
        _needs,
        _processes,
        _numbers,
        _pickled,
        _replaced,
        _conflicts,
        _duplicates,
        _rivals,
        _owners,
        _circles,
        _arguments,
    )
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
        if wanted and (advice := catalog.upgrade(wanted, API_VERSION, item.package)):
            who = run.named(item) + (f" of {item.package} {item.version}" if item.kind != "-" else "")
            yield f"{who} was written for core API {wanted}, this is {API_VERSION}: {advice}"


def _needs(run: Run) -> Iterator[str]:
    for item in run.selected:
        lines = _asked(run, item, "needs", partial(_missing, run, item))
        yield from (f"{run.named(item)}: {line}" for line in lines)


def _missing(run: Run, item: Selected) -> list[str]:
    return [line for need in item.declaration.needs if (line := need.missing(run))]


def _asked(run: Run, item: Selected, what: str, ask: Callable[[], list[str]]) -> list[str]:
    """Returns the problems that a technique's own check reports.

    Raises:
        ConfigError: If the check itself fails, which is a fault of the technique's package.
    """
    try:
        return ask()
    except ConfigError as error:
        return [str(error)]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{run.named(item)} of {item.package} {item.version}: its {what} failed with {reason}\n"
            f"That is a fault of the technique: repair or upgrade it, or take {item.name} out of the run."
        ) from error


def _processes(run: Run) -> Iterator[str]:
    most = max(os.cpu_count() or 1, TRIAL_PROCESSES)
    if run.accelerator == "cpu" and run.devices > most and not run.offline:
        yield (
            f"{run.devices} processes on {os.cpu_count()} cores would fill the memory and wait for each other: "
            f"set --trainer.devices to {most} or less"
        )


def _numbers(run: Run) -> Iterator[str]:
    for path, least in LEAST.items():
        value = run.argument(path)
        if isinstance(value, int | float) and not least <= value < math.inf:
            place = run.place(path)
            yield f"{f'{place}: ' if place else ''}{path} is {value}, not a finite number from {least} upwards"
    for path, most in MOST.items():
        if isinstance(value := run.argument(path), int | float) and value > most:
            place = run.place(path)
            yield f"{f'{place}: ' if place else ''}{path} is more than {most:,}: set it to the steps that are to be trained"
    every = run.argument("trainer.val_check_interval")
    if type(every) is int and every < 1:
        place = run.place("trainer.val_check_interval")
        yield (
            f"{f'{place}: ' if place else ''}trainer.val_check_interval is {every}, not a number of optimizer steps from "
            "1 upwards: to train without validation, set --trainer.limit_val_batches=0"
        )


def _pickled(run: Run) -> Iterator[str]:
    """Yields that a strategy starts its ranks by pickling a trainer, or from a notebook."""
    word, method = run.argument("trainer.strategy"), run.argument("trainer.strategy.start_method")
    way = re.search("_(spawn|fork|notebook)(?=_|$)", word) if isinstance(word, str) else None
    if way or method in ("spawn", "fork", "forkserver"):
        place = run.place("trainer.strategy")
        yield (
            f"{f'{place}: ' if place else ''}trainer.strategy {word if way else f'with start_method {method}'} starts ranks as "
            "copies of this process, to which a run of the command line cannot be sent: set --trainer.strategy=ddp, which "
            "starts each rank as a command"
        )


def _replaced(run: Run) -> Iterator[str]:
    for item in run.selected:
        kinds = kinds_of(item.target) if item.kind == "-" and isinstance(item.target, type) else set()
        for entry in catalog.entries() if kinds else ():
            why = (entry.declared("replaces") or {}).get(item.name) if entry.kind in kinds else None
            if why:
                option = f"--{item.key}=" if entry.kind == "strategies" else ""
                yield f"{run.named(item)}: take {option}{entry.name}: {why}"


def _conflicts(run: Run) -> Iterator[str]:
    by_name, reported = {item.name: item for item in run.selected}, set()
    for item in run.selected:
        for other, reason in item.declaration.conflicts.items():
            pair = frozenset((item.name, other))
            if other in by_name and pair not in reported:  # both may have declared it
                reported.add(pair)
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
            yield f"{name} is {len(found)} times in trainer.callbacks{where}; keep one."


def _rivals(run: Run) -> Iterator[str]:
    plugins = [item for item in run.selected if item.key.startswith("trainer.plugins")]
    if len(plugins) < 2:
        return
    from lightning.fabric.plugins import CheckpointIO, Precision

    for base, part in ((CheckpointIO, "writes its checkpoints"), (Precision, "decides on its precision")):
        found = [item for item in plugins if isinstance(item.target, type) and issubclass(item.target, base)]
        if len(found) > 1:
            names = " and ".join(map(run.named, found))
            yield (
                f"{names} are in trainer.plugins, and one {part} of a run: keep one. In YAML "
                f"`plugins: {{{found[0].name}: null, {found[-1].name}: {{}}}}` puts the last in place of the first"
            )


def _owners(run: Run) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for item in run.selected:
        implied = ("learning_rate",) if item.key == "model.lr_scheduler" else ()
        for owned in dict.fromkeys((*implied, *item.declaration.owns)):
            owners.setdefault(owned, []).append(run.named(item))
    for owned, path, neutral, off in TRAINERS_OWN:
        if (run.argument(path) or neutral) != neutral:
            place = run.place(path) or "its default"
            owners.setdefault(owned, []).append(f"{path} ({place}; ={off} turns it off)")
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
        judge = item.target.preflight if isinstance(item.target, ChecksRun) else None
        if inspect.ismethod(judge):  # the classmethod, not another attribute of this name
            lines = _asked(run, item, "preflight", partial(_judged, judge, run, item))
            yield from (f"{_named_by(run, item, line)}: {line}" for line in lines)


def _judged(judge: Callable[[Run, Selected], Any], run: Run, item: Selected) -> list[str]:
    answer = judge(run, item)
    if answer is None or isinstance(answer, str):
        raise TypeError(f"it returned {answer!r}, where it has to yield a line for each problem")
    return [str(line) for line in answer]


def _named_by(run: Run, item: Selected, line: str) -> str:
    """Returns the technique with the place of the argument that begins the line; else with its own place."""
    first = line.partition(" ")[0].strip("`':,")
    place = run.place(f"{item.key}.{first}") if first in item.arguments else ""
    return f"{item.name} ({place})" if place else run.named(item)


def ordered(callbacks: Sequence[T]) -> list[T]:
    """Returns the callbacks so that every declared `before` and `after` holds; otherwise the given order is kept.

    Raises:
        ConfigError: If the declarations form a cycle.
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
    """Returns the indexes in an order that satisfies all declarations, and those that form a cycle, if any."""

    def precedes(first: int, second: int) -> bool:
        return names[second] in declared[first].before or names[first] in declared[second].after

    waiting, order = list(range(len(names))), []
    while free := [i for i in waiting if not any(precedes(j, i) for j in waiting if j != i)]:
        order.append(free[0])
        waiting.remove(free[0])
    while last := [i for i in waiting if not any(precedes(i, j) for j in waiting if j != i)]:
        waiting = [i for i in waiting if i not in last]  # these follow the cycle, and are not part of it
    return order, waiting
