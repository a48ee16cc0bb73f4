"""Finds mistakes in names, arguments and values before jsonargparse does, to say where and what instead.

jsonargparse reports that a value fits none of a union's types, in 10 to 60 lines without file or line.
Here the same values are compared with the signatures that they are for, and the first mistake is reported in one or two
lines. Values without a mistake are parsed by jsonargparse all the same: this module only explains.
"""

from __future__ import annotations

import copy
import os
import re
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError, nearest
from plugins.cli.configuration import signatures, trust
from plugins.cli.configuration.class_names import (
    Bases,
    either,
    find_class,
    fitting,
    listing_of,
    misregistered,
    names_for,
)
from plugins.cli.configuration.signatures import (
    REQUIRED,
    accepts,
    class_types,
    describe,
    given,
    literals,
    names_callables,
    parameters,
    takes_list,
    takes_null,
    takes_text,
    understood,
)
from plugins.cli.configuration.yaml_texts import Keys, parse_value


class Checker:
    """Compares values with signatures.

    Args:
        where: Gives the place in which a value was written, "file:line" or the argument.
    """

    def __init__(self, where: Callable[[Keys], str]) -> None:
        self.where = where

    def section(self, target: Any, values: Any, keys: Keys) -> None:
        """Checks the arguments of a class or function that is named at `keys`."""
        if values is None:
            return
        if not isinstance(values, Mapping):
            self._fail(keys, f"this is a section (`name: value` lines), not {values!r}.")
        known, takes_more = parameters(target)
        for name, value in values.items():
            if name not in known:
                names = understood(target) if takes_more else set(known)
                if names is None or name in names:
                    continue
                hint = nearest(str(name), names)
                listing = "" if hint else f"\nIt takes: {', '.join(sorted(names))}."
                self._fail((*keys, name), f"{_title(target)} has no argument {name!r}.{hint}{listing}")
            if value is not None or known[name].default is not None:
                self.value(known[name].hint, value, (*keys, name))

    def value(self, hint: Any, value: Any, keys: Keys) -> None:
        """Checks one value against its type hint."""
        bases = class_types(hint)
        if value is None and not takes_null(hint):
            self._fail(keys, f"{_subject(keys)} is null, not {describe(hint)}.")
        path = value.get("class_path") if isinstance(value, Mapping) else value
        function = not bases and names_callables(hint) and not takes_text(hint)
        if function and isinstance(path, str) and "." in path:
            self._named((), path, keys)
        if bases and isinstance(value, Mapping):
            self._chosen_class(bases, value, keys, given(hint))
        elif bases and isinstance(value, list) and takes_list(hint):
            for index, item in enumerate(value):
                self.value(typing.Union[bases], item, (*keys, index))  # noqa: UP007 - a tuple of classes
        elif bases and isinstance(value, str) and "str" not in describe(hint).split(" | "):
            self._complete(self._named(bases, value, keys), {}, keys, given(hint))
        elif bases and isinstance(value, str) and not accepts(hint, value):
            self._named(bases, value, keys)
        elif not accepts(hint, value):
            options = ", ".join(dict.fromkeys(str(option) for option in literals(hint)))
            wanted = f"one of {options}" if options else describe(hint)
            self._fail(
                keys,
                f"{_subject(keys)} is {value!r}, not {wanted}.{nearest(str(value), set(options.split(', ')))}",
            )

    def _chosen_class(self, bases: Bases, value: Mapping[str, Any], keys: Keys, given: int) -> None:
        if "class_path" not in value:
            extra = [name for name in value if name not in ("init_args", "dict_kwargs")]
            if extra and isinstance(keys[-1], int) and extra[0] in names_for(bases):
                self._fail(
                    keys,
                    f"`{extra[0]}: {{...}}` is an item of a list here, which is written\n"
                    f"  - class_path: {extra[0]}\n    init_args: {{...}}\n"
                    f"or take the dashes away: write `{extra[0]}: {{...}}` below `{keys[-2]}:` (without +).",
                )
            hint = nearest(str(extra[0]), {"class_path", "init_args"}) if extra else ""
            self._fail(keys, f"`class_path: NAME` is missing; which {either(bases)} is meant?{hint}")
        for name in value:
            if name not in ("class_path", "init_args", "dict_kwargs"):
                self._fail(
                    (*keys, name),
                    f"{name!r} is beside class_path; arguments go below init_args."
                    f"{nearest(name, {'class_path', 'init_args'})}",
                )
        found = self._named(bases, value["class_path"], (*keys, "class_path"))
        self.section(found, value.get("init_args"), (*keys, "init_args"))
        self._complete(found, value.get("init_args") or {}, keys, given)

    def _complete(self, target: Any, values: Mapping[str, Any], keys: Keys, given: int) -> None:
        """Checks that a class gets the arguments that it requires, `given` of them from its caller."""
        known = parameters(target)[0]
        names = (understood(target, given) if isinstance(target, type) else None) or set()
        required = [name for name in known if name in names and known[name].default is REQUIRED]
        if missing := [f"{name} ({describe(known[name].hint)})" for name in required if name not in values]:
            how = "give it below init_args"
            if not any(isinstance(key, int) for key in keys):
                path = ".".join(str(key) for key in keys if key != "init_args")
                how += f", or --{path}.{missing[0].partition(' ')[0]}=VALUE"
            self._fail(keys, f"{_title(target)} needs {', '.join(missing)}: {how}.")

    def _named(self, bases: Bases, name: Any, keys: Keys) -> Any:
        if not isinstance(name, str):
            self._fail(keys, f"a class is named by a text, not by {name!r}.")
        found = find_class(name, bases)
        if isinstance(found, str):
            self._fail(keys, found)
        if not bases:
            return self._function(name, found, keys)
        if not isinstance(found, type):
            self._fail(keys, f"{name} is no class; {either(bases)} is wanted.{listing_of(bases)}")
        if not issubclass(found, bases):
            if fault := misregistered(found):
                self._fail(keys, fault)
            near = nearest(name.rpartition(".")[2], fitting(bases) - {name.rpartition(".")[2]})
            self._fail(keys, f"{found.__name__} is no {either(bases)}.{near}{listing_of(bases)}")
        return found

    def _function(self, name: str, found: Any, keys: Keys) -> Any:
        """Returns what is called at a place whose type says no class: the user's own, or a registered technique."""
        if not trust.active().has(name) and not trust.is_registered(name):
            self._fail(keys, trust.rule(name))
        if not callable(found):
            self._fail(keys, f"{name} is no function.")
        return found

    def _fail(self, keys: Keys, message: str) -> typing.NoReturn:
        raise ConfigError(f"{self.where(keys)}: {message}")


def _subject(keys: Keys) -> str:
    """Returns what a message says of the value at `keys`: its name, or "item 2 of callbacks"."""
    last = keys[-1]
    return f"item {last + 1} of {keys[-2]}" if isinstance(last, int) else last


def _title(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def finder(places: Mapping[Keys, str]) -> Callable[[Keys], str]:
    """Returns a function that gives the nearest known place of a value, relative to the working directory."""

    def where(keys: Keys) -> str:
        place = next((places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in places), None)
        return (place or "the configuration").removeprefix(f"{os.getcwd()}/")

    return where


def explain_lightning_error(error: Exception) -> str | None:
    """Returns how to correct a mistake that Lightning found only during the run; None for other errors."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from plugins.checkpoints.sharded import is_sharded

    if isinstance(error, MisconfigurationException):
        return str(error)
    if isinstance(error, IsADirectoryError) and is_sharded(folder := Path(str(error.filename))):
        names = " or ".join(entry.name for entry in catalog.entries() if entry.kind == "checkpoints")
        return (
            f"{folder} is a folder of ranks' parts, which only our checkpoint plugins read:\n"
            f"put {names} into trainer.plugins, or make a single file of it:\n"
            f"python -m core consolidate {folder} whole.ckpt"
        )
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    if place == ("lightning.pytorch.loops.fit_loop", "setup_data"):  # val_check_interval above the batches
        return f"trainer: {str(error).strip()}"
    if str(error).startswith("Early stopping conditioned on metric "):
        wanted, _, *logged = re.findall("`(.*?)`", str(error))
        known = {*logged, "val/loss", "val/perplexity"}
        if wanted in known:
            return (
                f"EarlyStopping: there is no {wanted} yet, the run has not validated. Train for longer, or set\n"
                "--trainer.val_check_interval to fewer optimizer steps than the run has."
            )
        hint, listing = nearest(wanted, known), ", ".join(sorted(known))
        return f"EarlyStopping: nothing is logged as {wanted!r}.{hint}\nThere are: {listing}."
    return None


def explain(
    values: Mapping[str, Any], positions: Mapping[Keys, str], arguments: list[tuple[str, str]]
) -> None:
    """Raises a ConfigError for the first mistake that is found; returns if there is none to be found here.

    Args:
        values: The composed configuration.
        positions: Path of keys -> "file:line".
        arguments: (name, value) of each option of the command line, names without the dashes.
    """
    merged, places = laid_over(values, positions, arguments)
    where = finder(places)
    checker = Checker(where)
    sections = signatures.sections()
    others = {"seed_everything": bool | int, "ckpt_path": Any, "weights_only": bool | None}
    for name, value in merged.items():
        if name == "data":
            checker.value(sections[name], value, (name,))
        elif name in sections:
            checker.section(sections[name], value, (name,))
        elif name in others:
            checker.value(others[name], value, (name,))
        else:
            listing = f"\nThere are {', '.join([*sections, *others])}."
            raise ConfigError(
                f"{where((name,))}: there is no section {name!r}.{nearest(name, set(sections))}{listing}"
            )

    model = merged.get("model") or {}
    needed = {"model.network", "model.objective", "model.optimizer", "data"}
    if missing := sorted(needed - {f"model.{name}" for name in model} - set(merged)):
        raise ConfigError(
            f"{', '.join(missing)}: missing, so there is nothing to run.\n"
            "Start from a whole config, for example --config quickstart; others go behind it."
        )


def laid_over(
    values: Mapping[str, Any], positions: Mapping[Keys, str], arguments: list[tuple[str, str]]
) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Returns the configuration with the arguments in it, and where each value was written; see `explain`."""
    merged, places = copy.deepcopy(dict(values)), dict(positions)
    for name, value in arguments:
        _lay_over(merged, name, parse_value(value) if value else value, places)
    return merged, places


def _lay_over(target: Any, name: str, value: Any, places: dict[Keys, str]) -> None:
    """Puts an argument like `model.network.n_layer` where a file would have it, below `init_args`."""
    keys: list[str | int] = []
    parts = name.split(".")
    for number, part in enumerate(parts, 1):
        if isinstance(target, list) and target:
            keys.append(len(target) - 1)
            if isinstance(target[-1], str):
                target[-1] = {"class_path": target[-1]}
            target = target[-1]
        if not isinstance(target, dict):
            return
        if "class_path" in target and part not in ("class_path", "init_args"):
            keys.append("init_args")
            target = target.setdefault("init_args", {})
        if number == len(parts) and part.endswith("+"):
            keys.append(part[:-1])
            items = target.get(part[:-1]) or []
            target[part[:-1]] = [*(items if isinstance(items, list) else [items]), value]
            keys.append(len(target[part[:-1]]) - 1)
        elif number == len(parts):
            keys.append(part)
            target[part] = value
        else:
            keys.append(part)
            if not isinstance(target.get(part), dict | list):
                target[part] = {"class_path": target[part]} if isinstance(target.get(part), str) else {}
            target = target[part]
    places[tuple(keys)] = f"--{name}"


_LESS_TELLING = ("Expected a", "Not a valid subclass")


def main_reason(message: str) -> str:
    """Returns the line that explains most of jsonargparse's list of why a value fits none of a union's types."""
    _, union, errors = message.partition("Does not validate against any of the Union subtypes")
    items = re.findall(r"^( *)- (.*)", errors, re.MULTILINE)
    texts = [text for indent, text in items if indent == items[0][0]]
    if not union or not texts:
        return message
    return next((text for text in texts if not text.startswith(_LESS_TELLING)), texts[-1])
