"""Parts of a run that may be at fault because they are not leyden's, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

from core import catalog
from core.errors import ConfigError
from toolkit.diagnosis.case import Case

OURS = ("core.", "toolkit.", "conformance.", "plugins.", "callbacks.", "datamodules.", "lightning.", "torch.")


def is_known(class_path: str) -> bool:
    """Returns whether a class is leyden's, Lightning's or torch's, or is named by a short name."""
    return "." not in class_path or class_path.startswith(OURS)


def known_class(kind: type) -> type:
    """Returns the first class of leyden, Lightning or torch that a class is or derives from; itself if there is none."""
    return next((one for one in kind.__mro__ if one.__module__.startswith(OURS)), kind)


def packing_remedy(case: Case) -> dict[str, Any]:
    """Returns the overlay that takes the packing which a foreign one wraps, or Concatenate in its place; else nothing."""
    packing = case.option("data.packing")
    if not isinstance(packing, Mapping) or is_known(str(packing.get("class_path", ""))):
        return {}
    found = inner(packing)
    if found is None:
        documents = case.last("doctor/documents_per_row") > 1
        found = {"class_path": "Concatenate", "init_args": {"mask_documents": True} if documents else {}}
    return {"data": {"init_args": {"packing": found}}}


def class_remedy(
    case: Case, place: str, kind: str, otherwise: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the overlay that takes leyden's class in the place of a foreign one; else nothing.

    The part that it wraps; or the registered class whose name its own one ends with, with the arguments that this takes.

    Args:
        case: The run.
        place: Such as "model.network".
        kind: Of registered classes, such as "networks".
        otherwise: What is taken where there is no such class.
    """
    part = case.option(place)
    path = str(part.get("class_path", "")) if isinstance(part, Mapping) else ""
    if is_known(path) or not isinstance(part, Mapping):
        return {}
    name = path.rpartition(".")[2]
    bases = [entry for entry in catalog.entries() if entry.kind == kind and name.endswith(entry.name)]
    found = inner(part) or (dict(otherwise) if otherwise else None)
    if bases:
        base = max(bases, key=lambda entry: len(entry.name))
        with suppress(ConfigError):  # its package is not installed
            found = {"class_path": base.name, "init_args": taken_by(base.load(), part.get("init_args") or {})}
    for key in reversed(place.split(".") if found else ()):
        found = {key: found}
    return found or {}


def taken_by(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of some arguments that a class, or one that it derives from, has a name for."""
    methods = [vars(one)["__init__"] for one in kind.__mro__ if "__init__" in vars(one)]
    names = {name for method in methods for name in signature(method).parameters}
    return {name: value for name, value in arguments.items() if name in names}


def network_remedy(case: Case) -> dict[str, Any]:
    """Returns the overlay that takes the registered network which a foreign one has the arguments of; else nothing."""
    return class_remedy(case, "model.network", "networks")


def schedule_remedy(case: Case, warmup: float = 0.12) -> dict[str, Any]:
    """Returns the overlay that takes leyden's schedule in the place of a foreign one, or a cosine; else nothing."""
    cosine = {"class_path": "WarmupCosine", "init_args": {"warmup_steps": warmup}}
    return class_remedy(case, "model.lr_scheduler", "schedules", cosine)


PLACES: tuple[tuple[Any, ...], ...] = (
    ("model.objective", "objectives", {"class_path": "CausalLM"}),
    ("model.optimizer", "optimizers", {"class_path": "AdamW"}),
    ("data", "datamodules"),
    ("trainer.strategy", "strategies"),
)
"""Where else a foreign class may be, and what is taken in its place."""


def taken_out(case: Case) -> dict[str, Any]:
    """Returns the overlay that takes out foreign callbacks, or takes leyden's own in the place of another foreign part; else nothing."""
    found = without_callbacks(case) or network_remedy(case) or schedule_remedy(case)
    return found or next((one for place in PLACES if (one := class_remedy(case, *place))), {})


def foreign_callbacks(case: Case) -> list[str]:
    """Returns the class paths of callbacks that are not leyden's or Lightning's, as they are configured."""
    return [
        str(item["class_path"]) for item in case.callbacks() if not is_known(str(item.get("class_path", "")))
    ]


def without_callbacks(case: Case) -> dict[str, Any]:
    """Returns the overlay that takes the foreign callbacks out; empty if there are none."""
    names = foreign_callbacks(case)
    return {"trainer": {"callbacks": dict.fromkeys(names)}} if names else {}


def suspects(case: Case) -> str:
    """Returns the foreign callbacks, for a sentence."""
    return " and ".join(name.rpartition(".")[2] for name in foreign_callbacks(case))


def guard_remedy(case: Case, step: int, goes_back: bool = False) -> dict[str, Any]:
    """Returns the overlay of a guard against single bad steps, with history to judge by before a step.

    Args:
        case: The run.
        step: The first bad step.
        goes_back: Whether the step itself looked ordinary and did its damage: SpikeRollback. Else SkipStep drops it, where the
            optimizer can drop an update.
    """
    window = int(min(128, max(4, step // 3)))
    if not goes_back and case.class_of("model.optimizer") in ("AdamW", "SGD", "Adam"):
        return {"trainer": {"callbacks": {"SkipStep": {"window": window}}}}
    rewind = int(min(100, max(2, step // 8)))
    options = {
        "window": window,
        "rewind_steps": rewind,
        "skip_batches": 2 * rewind,
        "snapshot_every_n_steps": max(1, rewind // 2),
    }
    return {"trainer": {"callbacks": {"SpikeRollback": options}}}


def inner(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the part of leyden's that a foreign one wraps, as it is configured; None: it wraps none."""
    for value in (part.get("init_args") or {}).values():
        if isinstance(value, Mapping) and "class_path" in value:
            return dict(value) if is_known(str(value["class_path"])) else inner(value)
    return None
