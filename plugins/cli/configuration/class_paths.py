"""Full paths of classes in a configuration: from short names, and from paths of earlier versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from core import catalog

POSITIONS: dict[str, tuple[str, ...]] = {
    "trainer.callbacks": ("callbacks", "adapters"),
    "trainer.strategy": ("strategies",),
    "trainer.plugins": ("precision", "checkpoints"),
    "trainer.logger": ("loggers",),
    "model.network": ("networks",),
    "model.objective": ("objectives",),
    "model.optimizer": ("optimizers",),
    "model.lr_scheduler": ("schedules",),
    "data": ("datamodules",),
}
"""Position in a configuration -> kinds whose short names may be written there as plain strings, without `class_path`."""


def moved(class_path: str) -> catalog.Entry | None:
    """Returns the technique of leyden that a full path of an earlier version means; None for any other path.

    Stored configurations keep full paths, and files move: a path into one of leyden's packages at which nothing is
    defined means the one technique with that attribute.
    """
    module, _, attribute = class_path.rpartition(".")
    ours = [entry for entry in catalog.entries() if entry.package == "leyden" and entry.kind != "commands"]
    if module.partition(".")[0] not in {"core"} | {entry.module.partition(".")[0] for entry in ours}:
        return None
    if catalog.definition(module, attribute) is not None:
        return None
    found = [entry for entry in ours if entry.attribute == attribute]
    return found[0] if len(found) == 1 else None


def qualify(value: Any, package: str | None = None) -> None:
    """Replaces short names, and full paths of earlier versions, at every `class_path` by full paths, in place.

    Args:
        value: A configuration or a part of it.
        package: Only short names of this package; None: of all.
    """
    if isinstance(value, dict):
        name = value.get("class_path")
        if isinstance(name, str) and "." in name and (entry := moved(name)):
            value["class_path"] = entry.class_path
        pool = [entry for entry in catalog.entries() if entry.name == name and entry.kind != "commands"]
        pool = [entry for entry in pool if package in (None, entry.package)]
        if isinstance(name, str) and pool:
            value["class_path"] = pool[0].class_path if package else catalog.find(name).class_path
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        qualify(item, package)


def entry_of(name: Any, kinds: tuple[str, ...]) -> catalog.Entry | None:
    """Returns the technique of the first of these kinds that has a short name; None if none has."""
    for kind in kinds:
        if any(entry.kind == kind and entry.name == name for entry in catalog.entries()):
            return catalog.find(name, kind)
    return strategy_of(name) if "strategies" in kinds and name != "auto" else None


def strategy_of(word: Any) -> catalog.Entry | None:
    """Returns the strategy that declares a word of `trainer.strategy`, such as `ddp`, as its own; None if none does."""
    strategies = (entry for entry in catalog.entries() if entry.kind == "strategies")
    return next((entry for entry in strategies if word in (entry.declared("strategy_words") or ())), None)


def resolve_names(values: dict[str, Any]) -> None:
    """Replaces short names by full paths, at every `class_path` and at the known positions, in place."""
    for position, kinds in POSITIONS.items():
        *parents, key = position.split(".")
        holder: Any = values
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            items = holder[key] if isinstance(holder[key], list) else [holder[key]]
            found = [_named(item, kinds) for item in items]
            holder[key] = found if isinstance(holder[key], list) else found[0]
    qualify(values)


def _named(item: Any, kinds: tuple[str, ...]) -> Any:
    if isinstance(item, dict) and isinstance(item.get("class_path"), str):
        entry = entry_of(item["class_path"], kinds)
        return {**item, "class_path": entry.class_path} if entry else item
    entry = entry_of(item, kinds) if isinstance(item, str) else None
    return {"class_path": entry.class_path} if entry else item


def registered(words: Iterable[str]) -> list[catalog.Entry]:
    """Returns the techniques whose short name or full path is among the words.

    A short name that two packages registered is an error only here, where a run uses it; the full
    path of one of them says which is meant.
    """
    words = set(words)
    by_name: dict[tuple[str, str], list[catalog.Entry]] = defaultdict(list)
    for entry in catalog.entries():
        if entry.kind != "commands":
            by_name[entry.kind, entry.name].append(entry)
    chosen = []
    for (kind, name), pool in by_name.items():
        by_path = [entry for entry in pool if entry.class_path in words]
        chosen += by_path
        if name in words and not by_path:
            chosen.append(catalog.find(name, kind))
    return chosen
