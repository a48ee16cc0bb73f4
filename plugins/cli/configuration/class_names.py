"""Which classes an argument may name, by short name or full path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from core import catalog, user_folders
from core.errors import ConfigError, nearest
from plugins.cli.configuration import trust, user_modules

Bases = tuple[type, ...]
_ABSENT = object()
KIND_OF = {
    "Callback": "callbacks",
    "CheckpointIO": "checkpoints",
    "DocumentSource": "data",
    "Engine": "data",
    "Evaluation": "evaluations",
    "LightningDataModule": "datamodules",
    "Logger": "loggers",
    "LRScheduler": "schedules",
    "Network": "networks",
    "Objective": "objectives",
    "Optimizer": "optimizers",
    "Packing": "data",
    "Precision": "precision",
    "Reward": "rewards",
    "Sampler": "data",
    "Strategy": "strategies",
    "Tokenizer": "data",
    "TokenWriter": "data",
    "Transform": "data",
}
"""Base class -> the kind of technique that is registered for it."""


def kinds_of(target: type) -> set[str]:
    """Returns the kinds of technique that a class may be, by its bases."""
    return {KIND_OF[parent.__name__] for parent in target.__mro__ if parent.__name__ in KIND_OF}


def names_for(bases: Bases) -> dict[str, str]:
    """Returns short name -> full path of every registered technique and imported class that fits."""
    kinds = {kind for base in bases for kind in kinds_of(base)}
    kinds |= {"adapters"} if "callbacks" in kinds else set()  # they are callbacks of a kind of their own
    found = {entry.name: entry.class_path for entry in catalog.entries() if entry.kind in kinds}
    for derived in (kind for base in bases for kind in _derived(base)):
        private = any(part.startswith("_") for part in f"{derived.__module__}.{derived.__name__}".split("."))
        if not private and not inspect.isabstract(derived):
            found.setdefault(derived.__name__, f"{derived.__module__}.{derived.__qualname__}")
    return found


def fitting(bases: Bases) -> set[str]:
    """Returns the short names of `names_for`, without the techniques of the same kind that keep another contract.

    Imports the techniques of such kinds, so it is for messages.
    """
    shared = {kind for kind in KIND_OF.values() if list(KIND_OF.values()).count(kind) > 1}
    return {name for name, path in names_for(bases).items() if _fits(path, bases, shared)}


def _fits(class_path: str, bases: Bases, shared: set[str]) -> bool:
    entry = catalog.by_class_path(class_path)
    if entry is None or entry.kind not in shared:
        return True
    try:
        found = entry.load()
    except ConfigError:  # not known; better to list it than to hide it
        return True
    return not isinstance(found, type) or issubclass(found, bases)


def misregistered(found: type) -> str | None:
    """Returns a message if a class is registered as a kind of technique whose base class it lacks; else None."""
    entry = catalog.by_class_path(f"{found.__module__}.{found.__qualname__}")
    wanted = {base for base, kind in KIND_OF.items() if entry is not None and kind == entry.kind}
    if entry is None or not wanted or wanted & {parent.__name__ for parent in found.__mro__}:
        return None
    return (
        f"{entry.name} of {entry.origin} is registered in leyden.{entry.kind}, but is no "
        f"{' or '.join(sorted(wanted))}.\nUpgrade or repair {entry.package}, or take {entry.name} out of the run."
    )


def _derived(base: Any) -> Iterator[type]:
    for derived in base.__subclasses__():
        yield derived
        yield from _derived(derived)


def find_class(name: str, bases: Bases) -> Any:
    """Returns the class that a short name or a full path means, or a text that says why there is none.

    Imports nothing that is not trusted. Without bases, anything that may be called is returned.
    """
    known = names_for(bases)
    if "." not in name and name not in known:
        return (
            f"there is no {either(bases)} named {name!r}.{nearest(name, fitting(bases))}{listing_of(bases)}"
        )
    name = known.get(name, name)
    if fault := trust.refusal(name):
        return fault
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, _ABSENT)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing in user_folders.PACKAGES:
            return _not_in_a_folder(error.name or module)
        return f"{name}: there is no module {error.name!r}. Is its package installed? pip install {missing}"
    except (Exception, SystemExit) as error:
        lacking = getattr(getattr(error, "obj", None), "__name__", getattr(error, "name", None))
        fault = f"{name} cannot be imported: {type(error).__name__}: {error}"
        return fault + _hidden(f"{lacking}.*", "what is imported")
    if found is not _ABSENT:
        return _trusted(name, found)
    names = set(vars(importlib.import_module(module)))
    return f"{module} has no {attribute!r}.{nearest(attribute, names)}{_hidden(name, attribute)}"


def _hidden(path: str, wanted: str) -> str:
    """Returns a line about the user's file that a module of ours hides; empty if there is none."""
    file = user_modules.hidden(path)
    lines = f"\n{file} is hidden by our module of that name: move {wanted} into a file of another name."
    return lines if file else ""


def _not_in_a_folder(module: str) -> str:
    """Returns what to say where neither one of our packages nor a user's folder of its name has a module."""
    package, _, name = module.rpartition(".")
    folders = (
        folder.joinpath(*package.split(".")) for folder in (user_folders.HOUSE, *user_folders.folders())
    )
    known = {file.stem for folder in folders if folder.is_dir() for file in folder.glob("[!_]*.py")}
    where = f"{package.replace('.', '/')}/{name}.py"
    return f"there is no module {module!r}.{nearest(name, known)}\nA file {where} has to lie beside the config, or in the working directory."


def _trusted(name: str, found: Any) -> Any:
    """Returns what was found, or a text where it was only imported there, from a module that is not trusted."""
    owner = found if hasattr(found, "__qualname__") else type(found)
    home = f"{owner.__module__}.{owner.__qualname__}"
    if trust.active().has(home) or trust.is_of_house(home):
        return found
    if any(
        entry.load() is found for entry in catalog.entries() if entry.attribute == name.rpartition(".")[2]
    ):
        return found
    return trust.refusal(home) or trust.rule(home)


def either(bases: Bases) -> str:
    """Returns the classes as people say them: Logger or Callback."""
    return " or ".join(base.__name__ for base in bases) or "function"


def listing_of(bases: Bases) -> str:
    """Returns a line with the registered techniques that fit; empty for none or too many."""
    paths = names_for(bases)
    entries = sorted(name for name in fitting(bases) if catalog.by_class_path(paths[name]))
    return f"\nRegistered: {', '.join(entries)}." if entries and len(entries) < 20 else ""
