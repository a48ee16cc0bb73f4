"""Holds the techniques that a run selected against each other before anything is started."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any, TypeVar

from core import catalog
from core.errors import ConfigError
from core.technique import Declaration, declaration_of

T = TypeVar("T")


@dataclass(frozen=True)
class Selected:
    """One class that a configuration names, with what is known about it.

    Attributes:
        key: Where it stands in the configuration, for example "trainer.callbacks.2".
    """

    key: str
    name: str
    class_path: str
    kind: str
    package: str
    version: str
    declaration: Declaration


def selection(config: Mapping[str, Any]) -> list[Selected]:
    """Returns every class named by a `class_path` in a parsed configuration, in its order."""
    return [_describe(key, class_path) for key, class_path in _class_paths(config, "")]


def _class_paths(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield key, value["class_path"]
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for name, item in items:
        yield from _class_paths(item, f"{key}.{name}".removeprefix("."))


def _describe(key: str, class_path: str) -> Selected:
    module, _, name = class_path.rpartition(".")
    found = declaration_of(getattr(import_module(module), name))
    entry = catalog.by_class_path(class_path)
    if entry:
        kind, package, number = entry.kind, entry.package, entry.version
    else:
        kind, package, number = "-", *_package_of(module)
    return Selected(key, name, class_path, kind, package, number, found or Declaration(paper=""))


@cache
def _package_of(module: str) -> tuple[str, str]:
    names = packages_distributions().get(module.partition(".")[0])
    return (names[0], version(names[0])) if names else ("(not a package)", "-")


def check(selected: Sequence[Selected]) -> None:
    """Raises one ConfigError with every problem of the selection: needs, conflicts, duplicates, owners."""
    problems = [*_needs(selected), *_conflicts(selected), *_duplicates(selected), *_owners(selected)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise ConfigError(
            "\n".join([f"This selection cannot run, {count}:", *(f"- {line}" for line in shown)])
        )


def _needs(selected: Sequence[Selected]) -> Iterator[str]:
    for item in selected:
        for need in item.declaration.needs:
            if missing := need.missing():
                yield f"{item.name}: {' '.join(missing.split())}"


def _conflicts(selected: Sequence[Selected]) -> Iterator[str]:
    names, told = {item.name for item in selected}, set()
    for item in selected:
        for other, reason in item.declaration.conflicts.items():
            pair = frozenset((item.name, other))
            if other in names and pair not in told:  # both may have declared it
                told.add(pair)
                yield f"{item.name} and {other} exclude each other: {reason}"


def _duplicates(selected: Sequence[Selected]) -> Iterator[str]:
    callbacks = Counter(
        item.name for item in selected if re.fullmatch(r"trainer\.callbacks(\.\d+)?", item.key)
    )
    for name, count in callbacks.items():
        if count > 1:
            yield f"{name} stands {count} times in trainer.callbacks; keep one."


def _owners(selected: Sequence[Selected]) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for item in selected:
        for owned in item.declaration.owns:
            owners.setdefault(owned, []).append(item.name)
    for owned, names in owners.items():
        if len(names) > 1:
            yield f"{' and '.join(names)} would both control the {owned.replace('_', ' ')}; keep one."


def ordered(callbacks: Sequence[T]) -> list[T]:
    """Returns the callbacks so that every declared `before` and `after` holds, else in the given order.

    Raises:
        ConfigError: If the declarations form a cycle.
    """
    names = [type(callback).__name__ for callback in callbacks]
    declared = [declaration_of(type(callback)) or Declaration(paper="") for callback in callbacks]

    def precedes(first: int, second: int) -> bool:
        return names[second] in declared[first].before or names[first] in declared[second].after

    waiting, result = list(range(len(callbacks))), []
    while waiting:
        free = [i for i in waiting if not any(precedes(j, i) for j in waiting if j != i)]
        if not free:
            cycle = ", ".join(names[i] for i in waiting)
            raise ConfigError(f"These callbacks each ask to come before another in a circle: {cycle}")
        result.append(free[0])
        waiting.remove(free[0])
    return [callbacks[i] for i in result]


def table(selected: Sequence[Selected]) -> str:
    """Returns the selection as plain text: technique, kind, package, version, where it stands."""
    rows = [("technique", "kind", "package", "version", "selected at")]
    rows += [(item.name, item.kind, item.package, item.version, item.key) for item in selected]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
