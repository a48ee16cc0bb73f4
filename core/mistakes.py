"""Finds mistakes in names, arguments and values before jsonargparse does, to say where and what instead.

jsonargparse reports that a value fits none of a union's types, in 10 to 60 lines without file or line.
Here the same values are walked beside the signatures that they are for, and the first mistake is told in
one or two lines. What passes is parsed by jsonargparse all the same: this module only explains.
"""

from __future__ import annotations

import copy
import inspect
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from core.class_names import Bases, either, find_class, listing_of, names_for
from core.errors import ConfigError, nearest

Keys = tuple[str | int, ...]
_UNTYPED = (inspect.Parameter.empty, Any)


class Checker:
    """Walks values beside signatures.

    Args:
        where: Gives the place in which a value was written, "file:line" or the argument.
    """

    def __init__(self, where: Callable[[Keys], str]) -> None:
        self.where = where

    def section(self, target: Any, values: Any, keys: Keys) -> None:
        """Checks the arguments of a class or function whose path stands at `keys`."""
        if values is None:
            return
        if not isinstance(values, Mapping):
            self._fail(keys, f"this is a section (`name: value` lines), not {values!r}.")
        known, takes_more = parameters(target)
        for name, value in values.items():
            if name not in known and takes_more:
                continue
            if name not in known:
                hint = nearest(str(name), set(known))
                listing = "" if hint else f"\nIt takes: {', '.join(sorted(known))}."
                self._fail((*keys, name), f"{_title(target)} has no argument {name!r}.{hint}{listing}")
            self.value(known[name], value, (*keys, name))

    def value(self, hint: Any, value: Any, keys: Keys) -> None:
        """Checks one value against its type hint."""
        bases = class_types(hint)
        if bases and isinstance(value, Mapping):
            self._chosen_class(bases, value, keys)
        elif bases and isinstance(value, list) and takes_list(hint):
            for index, item in enumerate(value):
                self.value(typing.Union[bases], item, (*keys, index))  # noqa: UP007 - a tuple of classes
        elif bases and isinstance(value, str) and not accepts(hint, value):
            self._named(bases, value, keys)
        elif not accepts(hint, value):
            options = ", ".join(str(option) for option in literals(hint))
            wanted = f"one of {options}" if options else describe(hint)
            self._fail(
                keys, f"{keys[-1]} is {value!r}, not {wanted}.{nearest(str(value), set(options.split(', ')))}"
            )

    def _chosen_class(self, bases: Bases, value: Mapping[str, Any], keys: Keys) -> None:
        if "class_path" not in value:
            extra = [name for name in value if name not in ("init_args", "dict_kwargs")]
            hint = nearest(str(extra[0]), {"class_path", "init_args"}) if extra else ""
            self._fail(keys, f"`class_path: NAME` is missing; which {either(bases)} is meant?{hint}")
        for name in value:
            if name not in ("class_path", "init_args", "dict_kwargs"):
                self._fail(
                    (*keys, name),
                    f"{name!r} stands beside class_path; arguments go below init_args."
                    f"{nearest(name, {'class_path', 'init_args'})}",
                )
        found = self._named(bases, value["class_path"], (*keys, "class_path"))
        self.section(found, value.get("init_args"), (*keys, "init_args"))

    def _named(self, bases: Bases, name: Any, keys: Keys) -> Any:
        if not isinstance(name, str):
            self._fail(keys, f"a class is named by a text, not by {name!r}.")
        found = find_class(name, bases)
        if isinstance(found, str):
            self._fail(keys, found)
        if isinstance(found, type) and not issubclass(found, bases):
            fitting = nearest(name.rpartition(".")[2], set(names_for(bases)) - {name.rpartition(".")[2]})
            self._fail(keys, f"{found.__name__} is no {either(bases)}.{fitting}{listing_of(bases)}")
        return found

    def _fail(self, keys: Keys, message: str) -> typing.NoReturn:
        raise ConfigError(f"{self.where(keys)}: {message}")


def parameters(target: Any) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of a class or function with their types, and whether it may take others.

    Arguments that a class passes on to its bases are among them; what it passes to something else is not.
    """
    functions = [target]
    if isinstance(target, type):
        functions = [vars(kind)["__init__"] for kind in target.__mro__[:-1] if "__init__" in vars(kind)]
    found: dict[str, Any] = {}
    passed_on = False
    for function in functions:
        try:
            signature = inspect.signature(function)
            hints = typing.get_type_hints(function)
        except (ValueError, TypeError, NameError):
            continue
        passed_on = False
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                passed_on |= parameter.kind is parameter.VAR_KEYWORD
            elif name != "self":
                found.setdefault(name, hints.get(name, Any))
        if not passed_on:
            break
    return found, passed_on


def class_types(hint: Any) -> Bases:
    """Returns the classes that a value of this type names: of `Network`, `list[Callback]`, `Callable[[], X]`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return (hint,) if isinstance(hint, type) and _has_classes(hint) else ()
    if origin is typing.Literal:
        return ()
    parts = inner[-1:] if _is_callable(origin) else inner
    return tuple(dict.fromkeys(found for part in parts for found in class_types(part)))


def _has_classes(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in (
        "builtins",
        "datetime",
        "pathlib",
        "typing",
        "collections",
        "os",
    )


def _is_callable(origin: Any) -> bool:
    return getattr(origin, "__name__", "") == "Callable"


def takes_list(hint: Any) -> bool:
    """Returns whether a list is among the types."""
    origin = typing.get_origin(hint)
    if getattr(origin, "__name__", "") in ("list", "Iterable", "Sequence"):
        return True
    return not _is_callable(origin) and any(takes_list(part) for part in typing.get_args(hint))


def literals(hint: Any) -> list[Any]:
    """Returns the values that a Literal, or a union with one, allows."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for part in typing.get_args(hint) for value in literals(part)]


def accepts(hint: Any, value: Any) -> bool:
    """Returns whether jsonargparse takes a plain value for this type."""
    if hint in _UNTYPED:
        return True
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
        parser.parse_object({"value": value})
    except Exception:  # argparse, type and value errors alike: the answer is no
        return False
    return True


def describe(hint: Any) -> str:
    """Returns a type as people write it: int, float or none, list of int."""
    return str(getattr(hint, "__name__", hint)).replace("typing.", "").replace("NoneType", "null")


def _title(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def explain(
    values: Mapping[str, Any], positions: Mapping[Keys, str], arguments: list[tuple[str, str]]
) -> None:
    """Raises a ConfigError for the first mistake that is found; returns if there is none to be found here.

    Args:
        values: The composed configuration.
        positions: Path of keys -> "file:line".
        arguments: (name, value) of each option of the command line, names without the dashes.
    """
    from lightning.pytorch import LightningDataModule, Trainer

    from core.language_module import LanguageModule

    merged, places = copy.deepcopy(dict(values)), dict(positions)
    for name, value in arguments:
        _lay_over(merged, name, yaml.safe_load(value) if value else value, places)

    def where(keys: Keys) -> str:
        place = next((places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in places), None)
        return (place or "the configuration").removeprefix(f"{os.getcwd()}/")

    checker = Checker(where)
    sections = {"trainer": Trainer, "model": LanguageModule, "data": LightningDataModule}
    others = {"seed_everything": bool | int, "ckpt_path": Any, "weights_only": bool | None}
    for name, value in merged.items():
        if name == "data":
            checker.value(LightningDataModule, value, ("data",))
        elif name in sections:
            checker.section(sections[name], value, (name,))
        elif name in others:
            checker.value(others[name], value, (name,))
        else:
            listing = f"\nThere are {', '.join([*sections, *others])}."
            raise ConfigError(
                f"{where((name,))}: there is no section {name!r}.{nearest(name, set(sections))}{listing}"
            )


def _lay_over(target: Any, name: str, value: Any, places: dict[Keys, str]) -> None:
    """Puts an argument like `model.network.n_layer` where a file would have it, below `init_args`."""
    keys: list[str | int] = []
    *parents, last = name.split(".")
    for part in [*parents, last]:
        if isinstance(target, list) and target:
            keys.append(len(target) - 1)
            target = target[-1]
        if not isinstance(target, dict):
            return
        if "class_path" in target and part not in ("class_path", "init_args"):
            keys.append("init_args")
            target = target.setdefault("init_args", {})
        if part is last and part.endswith("+"):
            keys.append(part[:-1])
            items = target.get(part[:-1]) or []
            target[part[:-1]] = [*(items if isinstance(items, list) else [items]), value]
            keys.append(len(target[part[:-1]]) - 1)
        elif part is last:
            keys.append(part)
            target[part] = value
        else:
            keys.append(part)
            if not isinstance(target.get(part), dict | list):
                target[part] = {"class_path": target[part]} if isinstance(target.get(part), str) else {}
            target = target[part]
    places[tuple(keys)] = f"--{name}"
