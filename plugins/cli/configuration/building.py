"""Builds the classes of a run and its trainer; of what fails it says which, where it was asked for, and why."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy, StrategyRegistry

from core import catalog
from core.errors import ConfigError, nearest
from core.lightning_compat import AcceleratorConnector
from plugins.cli.configuration.class_names import names_for
from plugins.cli.configuration.class_paths import strategy_of
from plugins.cli.error_messages import explain_error
from toolkit.selection import Run

OWN_PRECISION = (DeepSpeedStrategy, FSDPStrategy)
"""Strategies with an fp16 precision of their own, which take no other plugin."""


def explain_build_error(target: Any, error: Exception, run: Run) -> str:
    """Returns what a class had against its arguments, behind the place where it or the argument was written."""
    text = (
        str(error)
        if isinstance(error, ConfigError)
        else explain_error(error, getattr(target, "__name__", "leyden"))
    )
    item = next((item for item in run.selected if item.target is target), None)
    if item is None:
        return text
    found = {name: re.search(rf"\b{re.escape(name)}\b", str(error)) for name in item.arguments}
    named = sorted((at.start(), name) for name, at in found.items() if at)
    places = [run.place(f"{item.key}.{name}") for _, name in named] or [run.place(f"{item.key}.class_path")]
    place = min(places, key=lambda place: not place.startswith("--"))  # what was typed last is changed first
    return f"{place}: {text}" if place else text


@contextmanager
def placed_warnings(run: Run) -> Iterator[None]:
    """Shows a warning of an argument's former name, such as `data.stages`, at the line that has it."""
    with warnings.catch_warnings(record=True) as found:
        yield
    for one in found:
        said = str(one.message)
        place = " is deprecated " in said and re.fullmatch(r"(.+):(\d+)", run.place(said.partition(" ")[0]))
        file, line = (place[1], int(place[2])) if place else (one.filename, one.lineno)
        warnings.warn_explicit(one.message, one.category, file, line)


def make_trainer(options: Mapping[str, Any], run: Run, make: Callable[..., Any] = Trainer) -> Any:
    """Makes a trainer, or the part of one that `make` makes.

    An accelerator given as a class is taken for its word: Lightning holds only the word against precision and
    strategy, so that `bf16-mixed` beside `CPUAccelerator()` would train in float32. A word that a precision declares
    as its own means that one: for Lightning `16-mixed` is bfloat16 on a CPU. So does the strategy that Lightning chooses
    by itself, `ddp` for several processes.

    Raises:
        ConfigError: If Lightning refuses an option in words; says where the option was written. If the
            autocast of a precision is another device's.
    """
    options = _with_precision({**options, "accelerator": word_for(options.get("accelerator", "auto"))})
    try:
        trainer = make(**_with_strategy(options))
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
    _check_autocast(trainer, run)
    return trainer


def hardware_of(options: Mapping[str, Any], run: Run) -> Any:
    """Returns what Lightning takes those of a trainer's options for that are words and numbers.

    It has `accelerator`, `strategy`, `precision_plugin` and `cluster_environment`.
    """
    names = ("accelerator", "devices", "num_nodes", "strategy", "precision")
    words = {name: options[name] for name in names if not isinstance(options[name], Mapping)}
    if isinstance(options["accelerator"], Mapping):
        words["accelerator"] = word_for(resolve_name(options["accelerator"]["class_path"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run's own trainer warns
        return make_trainer(words, run, AcceleratorConnector)


def devices_of(hardware: Any) -> int:
    """Returns how many devices of this machine are used."""
    devices = getattr(hardware.strategy, "parallel_devices", None)
    return len(devices) if devices is not None else 1


def word_for(accelerator: Any) -> Any:
    """Returns the word for one of Lightning's accelerators, or its class; anything else as it is."""
    kind = accelerator if isinstance(accelerator, type) else type(accelerator)
    words = (word for word, entry in AcceleratorRegistry.items() if entry["accelerator"] is kind)
    return next(words, accelerator)


def _with_precision(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the technique in place of a word for the precision, if one declares the word."""
    strategy, word = options.get("strategy"), options.get("precision")
    own = isinstance(strategy, OWN_PRECISION) or str(strategy).startswith(("deepspeed", "fsdp"))
    precisions = (
        [e for e in catalog.entries() if e.kind == "precision"] if word is not None and not own else []
    )
    entry = next((e for e in precisions if str(word) in (e.declared("precision_words") or ())), None)
    if entry is None:
        return options
    plugins = options.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    if any(
        isinstance(plugin, Precision) for plugin in plugins
    ):  # one of the two is too much; Lightning says so
        return options
    return {**options, "precision": None, "plugins": [*plugins, entry.load()()]}


def _with_strategy(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the technique in place of the strategy that `auto` means, if one declares its word."""
    if options.get("strategy", "auto") != "auto":
        return options
    names = ("accelerator", "devices", "num_nodes", "plugins")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer warns
        chosen = AcceleratorConnector(**{name: options[name] for name in names if name in options}).strategy
    words = (word for word, entry in StrategyRegistry.items() if entry["strategy"] is type(chosen))
    entry = next(filter(None, map(strategy_of, words)), None)
    return {**options, "strategy": entry.load()()} if entry else options


def _check_autocast(trainer: Trainer, run: Run) -> None:
    plugin, device = trainer.precision_plugin, trainer.strategy.root_device.type
    if type(plugin) is MixedPrecision and plugin.device != device:  # a class of its own may know better
        item = next((item for item in run.selected if item.target is type(plugin)), None)
        place = run.place(f"{item.key}.device") if item else ""
        raise ConfigError(
            f"{place or 'trainer.plugins'}: {type(plugin).__name__} is set up for {plugin.device}, this run is on "
            f"{device} and would train in float32. Set device to {device}, or use --trainer.precision={plugin.precision}."
        )


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
