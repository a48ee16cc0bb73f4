"""Builds the classes of a run and its trainer; of what fails it says which, where it was asked for, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from core import catalog
from core.blame import blame
from core.class_names import names_for
from core.errors import ConfigError, nearest
from core.selection import Run


class Builder:
    """Calls classes for jsonargparse and notes what failed: its own error tells only the first of a union's.

    Attributes:
        failed: The class that failed last, and its error.
    """

    def __init__(self) -> None:
        self.failed: tuple[Any, Exception] | None = None

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the class returns."""
        try:
            return target(*args, **kwargs)
        except Exception as error:
            if self.failed is None or self.failed[1] is not error:  # the innermost is the culprit
                self.failed = target, error
            raise


def complaint(target: Any, error: Exception, run: Run) -> str:
    """Returns what a class had against its arguments, behind the place where it or the argument was written."""
    text = (
        str(error) if isinstance(error, ConfigError) else blame(error, getattr(target, "__name__", "leyden"))
    )
    item = next((item for item in run.selected if item.target is target), None)
    if item is None:
        return text
    found = {name: re.search(rf"\b{re.escape(name)}\b", str(error)) for name in item.arguments}
    named = sorted((at.start(), name) for name, at in found.items() if at)
    places = [run.place(f"{item.key}.{name}") for _, name in named] or [run.place(f"{item.key}.class_path")]
    place = min(places, key=lambda place: not place.startswith("--"))  # what was typed last is changed first
    return f"{place}: {text}" if place else text


def make_trainer(options: Mapping[str, Any], run: Run) -> Trainer:
    """Makes a trainer.

    Raises:
        ConfigError: If Lightning refuses an option in words; says where the option was written.
    """
    try:
        return Trainer(**options)
    except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
        text = str(error).strip()
        if isinstance(error, TypeError) and "`" not in text:  # Python's words, not Lightning's
            raise
        _check_strategy(options, run)
        _check_accelerator(options, run)
        quoted = re.findall(r"`(?:Trainer\()?(\w+)", text)
        name = next((word for word in quoted if word in options), None)
        if name and str(options[name]) not in text:
            text += f" It is {'null' if options[name] is None else repr(options[name])}."
        raise ConfigError(f"{_place(run, name)}: {text}") from error


def _place(run: Run, option: str | None) -> str:
    return (run.place(f"trainer.{option}") if option else "") or "trainer"


def _check_strategy(options: Mapping[str, Any], run: Run) -> None:
    value = options.get("strategy")
    known = {entry.name for entry in catalog.entries() if entry.kind == "strategies"}
    known |= {"auto", *StrategyRegistry.available_strategies()}
    if not isinstance(value, str) or value in known:
        return
    is_class = value.rpartition(".")[2] in names_for((Strategy,))
    hint = (
        f" A class is chosen by --trainer.strategy.class_path={value}" if is_class else nearest(value, known)
    )
    raise ConfigError(f"{_place(run, 'strategy')}: there is no strategy named {value!r}.{hint}")


def _check_accelerator(options: Mapping[str, Any], run: Run) -> None:
    value, known = options.get("accelerator"), set(AcceleratorRegistry.available_accelerators())
    if not isinstance(value, str) or value == "auto":
        return
    if value not in known | {"gpu"}:
        hint = nearest(value, {"gpu", *known})
        raise ConfigError(f"{_place(run, 'accelerator')}: there is no accelerator named {value!r}.{hint}")
    here = {name for name in known if AcceleratorRegistry[name]["accelerator"].is_available()}
    if value not in here and not (value == "gpu" and here & {"cuda", "mps"}):
        raise ConfigError(
            f"{_place(run, 'accelerator')}: accelerator is {value}, and torch finds none on this machine, "
            f"which has: {', '.join(sorted(here))}. --trainer.accelerator=auto takes what there is."
        )
