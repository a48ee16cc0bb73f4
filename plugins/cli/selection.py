"""Finds the classes that a configuration names, with what is known of them before they are built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from core import catalog
from core.technique import Declaration, declaration_of
from plugins.cli import declarations
from plugins.cli.configuration import user_modules
from toolkit.selection import Selected

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

LIGHTNINGS_OWNERS = {
    "BatchSizeFinder": ("batch_size",),
    "GradientAccumulationScheduler": ("gradient_accumulation",),
    "LearningRateFinder": ("learning_rate",),
    "StochasticWeightAveraging": ("learning_rate",),
}
"""Callback of Lightning's -> what it owns, as `@technique(owns=...)` would say of one of ours."""


_NO_PACKAGE = ("(not a package)", "-")
"""Name and version of what no package installed."""


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
    """Returns what is known about a class at a key of the configuration."""
    module, _, name = class_path.rpartition(".")
    entry = catalog.by_class_path(class_path)
    if entry:
        kind, package, number = entry.kind, entry.package, entry.version
    else:
        top = module.partition(".")[0]
        own = user_modules.added(class_path) is not None
        kind, package, number = "-", *(_NO_PACKAGE if own else _package_of(top))
    declarations.require_sound(target)
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
    return (found.metadata["Name"], found.version) if found else _NO_PACKAGE


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
    return describe_parts(used, selected)


def describe_parts(used: Iterable[tuple[str, Any]], selected: Sequence[Selected]) -> list[Selected]:
    """Returns what is known about the classes of objects with their keys, but for those that are selected already."""
    known = {item.target for item in selected}
    kinds = {type(part): key for key, part in used if type(part) not in known}
    return [
        describe(key, kind, f"{kind.__module__}.{kind.__qualname__}")
        for kind, key in kinds.items()
        if not kind.__module__.startswith("plugins.cli.")  # the record of the run, which no config selects
    ]


def table(selected: Sequence[Selected]) -> str:
    """Returns the selection as plain text: technique, kind, package, version, key in the configuration."""
    rows = [("technique", "kind", "package", "version", "selected at")]
    rows += [(item.name, item.kind, item.package, item.version, item.key) for item in selected]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
