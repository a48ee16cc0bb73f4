"""What a run selected: the classes that its configuration names, and what is known before they are built."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from core import catalog
from core.technique import Declaration, declaration_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Keys = tuple[str | int, ...]

LIGHTNINGS_OWNERS = {
    "BatchSizeFinder": ("batch_size",),
    "GradientAccumulationScheduler": ("gradient_accumulation",),
    "LearningRateFinder": ("learning_rate",),
    "StochasticWeightAveraging": ("learning_rate",),
}
"""Callback of Lightning's -> what it owns, as `@technique(owns=...)` would say of one of ours."""


@dataclass(frozen=True)
class Selected:
    """One class that a run uses, with what is known about it.

    Attributes:
        key: Where it stands in the configuration, for example "trainer.callbacks.2".
        arguments: Its arguments as plain values, defaults included.
        target: The class itself.
    """

    key: str
    name: str
    class_path: str
    kind: str
    package: str
    version: str
    declaration: Declaration
    arguments: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True)
class Run:
    """A run that is parsed and not built, as needs and checks see it.

    Attributes:
        selected: The classes that it uses, in the order of the configuration.
        config: The configuration as plain values, defaults included.
        places: Path of keys -> "file:line", or the argument, that wrote a value.
        accelerator: "cpu", "cuda", "mps" or the name of another of Lightning's.
        devices: Processes on each machine.
        world_size: Processes altogether.
        elsewhere: Whether it is checked for machines that are not here, whose devices are not known.
        command: What is done: fit, validate, test or predict.
    """

    selected: Sequence[Selected] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[Keys, str] = field(default_factory=dict)
    accelerator: str = "cpu"
    devices: int = 1
    world_size: int = 1
    elsewhere: bool = False
    command: str = "fit"

    def argument(self, path: str) -> Any:
        """Returns the value at a path like "model.network.vocab_size", or None where there is none."""
        return self._find(path)[0]

    def place(self, path: str) -> str:
        """Returns where the value at a path, or what holds it, was written; empty if nowhere."""
        keys = self._find(path)[1]
        places = (
            self.places[keys[:count]] for count in range(len(keys), 0, -1) if keys[:count] in self.places
        )
        return next(places, "").removeprefix(f"{os.getcwd()}/")

    def named(self, item: Selected) -> str:
        """Returns a technique's name with its place behind it, for messages."""
        place = self.place(item.key)
        return f"{item.name} ({place})" if place else item.name

    def _find(self, path: str) -> tuple[Any, Keys]:
        value: Any = self.config
        keys: list[str | int] = []
        for part in path.split("."):
            if (
                isinstance(value, Mapping)
                and "class_path" in value
                and part not in ("class_path", "init_args")
            ):
                keys.append("init_args")
                value = value.get("init_args")
            keys.append(int(part) if isinstance(value, list) else part)
            value = dict(enumerate(value)) if isinstance(value, list) else value
            value = value.get(keys[-1]) if isinstance(value, Mapping) else None
        return value, tuple(keys)


def selection(config: Mapping[str, Any]) -> list[Selected]:
    """Returns every class named by a `class_path` in a parsed configuration, in its order."""
    return [
        describe(key, resolve_name(value["class_path"]), value["class_path"], value.get("init_args"))
        for key, value in _classes(config, "")
    ]


def _classes(value: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield key, value
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for name, item in items:
        yield from _classes(item, f"{key}.{name}".removeprefix("."))


def describe(key: str, target: Any, class_path: str, arguments: Mapping[str, Any] | None = None) -> Selected:
    """Returns what is known about a class that stands at a key of the configuration."""
    module, _, name = class_path.rpartition(".")
    entry = catalog.by_class_path(class_path)
    if entry:
        kind, package, number = entry.kind, entry.package, entry.version
    else:
        kind, package, number = "-", *_package_of(module.partition(".")[0])
    declaration = declaration_of(target) or Declaration(paper="", owns=_owned_by_lightning(target))
    return Selected(key, name, class_path, kind, package, number, declaration, dict(arguments or {}), target)


def _owned_by_lightning(target: Any) -> tuple[str, ...]:
    bases = getattr(target, "__mro__", ())
    names = (base.__name__ for base in bases if base.__module__.startswith("lightning.pytorch."))
    return next((LIGHTNINGS_OWNERS[name] for name in names if name in LIGHTNINGS_OWNERS), ())


@cache
def _package_of(top: str) -> tuple[str, str]:
    """Returns which distribution installed a top-level module, and its version."""
    registered = {e.module.partition(".")[0]: (e.package, e.version) for e in catalog.entries()}
    if top in registered:
        return registered[top]
    try:
        return top, version(top)  # most are named like what they install
    except PackageNotFoundError:
        found = next((d for d in distributions(path=[_folder_of(top)]) if top in _modules_of(d)), None)
    return (found.metadata["Name"], found.version) if found else ("(not a package)", "-")


def _folder_of(top: str) -> str:
    """Returns where a top-level module lies; to look for it in the lists of all distributions takes half a second."""
    try:
        spec = find_spec(top)
    except ValueError:  # of a module without one, such as __main__
        spec = None
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else [""]
    return str(Path(places[0]).parent)


def _modules_of(distribution: Distribution) -> set[str]:
    """Returns the top-level modules that a distribution installed, as it says or as its files are called."""
    declared = (distribution.read_text("top_level.txt") or "").split()
    return set(declared) or {Path(file.parts[0]).stem for file in distribution.files or ()}


def by_trainer(trainer: Trainer, selected: Sequence[Selected]) -> list[Selected]:
    """Returns what a trainer uses besides: a strategy and precision named by a word, what is on by default."""
    used = [("trainer.strategy", trainer.strategy), ("trainer.precision", trainer.precision_plugin)]
    used += [("trainer.logger", logger) for logger in trainer.loggers]
    used += [("by default", callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    known = {item.target for item in selected}
    kinds = {type(part): key for key, part in used if type(part) not in known}
    return [
        describe(key, kind, f"{kind.__module__}.{kind.__qualname__}")
        for kind, key in kinds.items()
        if not kind.__module__.startswith("core.")  # the record of the run, which nobody selects
    ]


def table(selected: Sequence[Selected]) -> str:
    """Returns the selection as plain text: technique, kind, package, version, where it stands."""
    rows = [("technique", "kind", "package", "version", "selected at")]
    rows += [(item.name, item.kind, item.package, item.version, item.key) for item in selected]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
