"""Callbacks changed, added or taken out by name, in YAML and on the command line; in YAML loggers and plugins too.

    trainer:
      callbacks:                       # a mapping, not a list: the other callbacks stay
        PeriodicCheckpoint: {every_n_steps: 50}
        TextSamples: null

`--callbacks.PeriodicCheckpoint.every_n_steps=50` and `--callbacks.-TextSamples` say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from core.errors import ConfigError, nearest

LISTS = ("callbacks", "plugins", "logger")
"""The Trainer's lists of classes, each of which may be written as a mapping of names."""

PATHS = tuple(f"trainer.{name}" for name in LISTS)
"""Their positions in a configuration."""

OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
"""What a class is written with."""

Positions = dict[tuple[str | int, ...], str]
Merge = Callable[[dict[str, Any], dict[str, Any]], Any]


def is_by_name(value: Any) -> bool:
    """Returns whether a value of `callbacks` is a mapping of names, not one callback or a list of them."""
    return isinstance(value, dict) and "class_path" not in value


def change(
    values: dict[str, Any],
    positions: Positions,
    changes: dict[str, Any],
    places: Positions,
    merge: Merge,
    key: str = "callbacks",
    missing: list[str] | None = None,
) -> None:
    """Changes the callbacks of a configuration in place.

    Args:
        values: The configuration so far.
        positions: Where its values were written; kept in step with the list.
        changes: Name or full path -> arguments to set, or None to take the callback out.
        places: Path within `changes` -> where it was written.
        merge: Lays the second mapping over the first.
        key: Which of LISTS.
        missing: Takes a message for each item that is to be taken out and is not there.

    Raises:
        ConfigError: If arguments are no mapping.
    """
    trainer = values["trainer"] = values.get("trainer") or {}
    if not isinstance(trainer, dict):
        place = positions.get(("trainer",), "--config")
        raise ConfigError(f"{place}: trainer is a section (`name: value` lines), not {trainer!r}.")
    at, found = ("trainer", key), trainer.get(key) or []
    items = [
        (item if isinstance(item, dict) else {"class_path": item}, _below(positions, (*at, index)))
        for index, item in enumerate(found if isinstance(found, list) else [found])
    ]
    for name, arguments in changes.items():
        where = places.get((name,), "--config")
        match = next((item for item in items if _is(item[0], name)), None)
        if arguments is None and match is not None:
            items.remove(match)
        elif arguments is None and missing is not None:
            missing.append(f"{where}: {_not_there(name, key, [item for item, _ in items])}")
        elif isinstance(arguments, dict):
            if match is None:
                match = ({"class_path": name}, {(): where, ("class_path",): where})
                items.append(match)
            _set_arguments(*match, arguments, _below(places, (name,)), merge)
        elif arguments is not None:
            raise ConfigError(
                f"{where}: {name} takes its arguments as a mapping, or null to take it out, not {arguments!r}."
            )
    trainer[key] = [item for item, _ in items]
    for path in [path for path in positions if path[:2] == at and len(path) > 2]:
        del positions[path]
    for index, (_, written) in enumerate(items):
        positions.update({(*at, index, *rest): line for rest, line in written.items()})


def _set_arguments(
    item: dict[str, Any], written: Positions, arguments: dict[str, Any], places: Positions, merge: Merge
) -> None:
    item["init_args"] = item.get("init_args") or {}
    merge(item["init_args"], _below_classes(item["init_args"], arguments))
    for rest, line in places.items():
        if rest:
            written[("init_args", *_path(item["init_args"], rest))] = line


def _below_classes(old: Any, new: Any) -> Any:
    """Returns what changes an argument, with `init_args` where the argument is a class: `reward.path` as `reward.init_args.path`."""
    if not isinstance(old, dict) or not isinstance(new, dict) or "class_path" in new:
        return new
    if "class_path" in old and not any(key in new for key in OF_A_CLASS):
        return {"init_args": _below_classes(old.get("init_args"), new)}
    return {key: _below_classes(old.get(key), value) for key, value in new.items()}


def _path(target: Any, keys: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Returns the path of a value in the changed configuration."""
    found: list[str | int] = []
    for key in keys:
        if isinstance(target, dict) and "class_path" in target and key not in OF_A_CLASS:
            found.append("init_args")
            target = target.get("init_args")
        found.append(key)
        target = target.get(key) if isinstance(target, dict) else None
    return tuple(found)


def _not_there(name: str, key: str, items: list[dict[str, Any]]) -> str:
    names = {str(item["class_path"]).rpartition(".")[2] for item in items}
    listing = ", ".join(sorted(names)) or "none"
    return f"{name} is not in trainer.{key}.{nearest(name, names)} There are: {listing}."


def _below(positions: Positions, head: tuple[str | int, ...]) -> Positions:
    return {path[len(head) :]: line for path, line in positions.items() if path[: len(head)] == head}


def _is(item: dict[str, Any], name: str) -> bool:
    path = str(item.get("class_path"))
    return name in (path, path.rpartition(".")[2])


def take_options(
    arguments: list[str], parse: Callable[[str], Any]
) -> tuple[dict[str, Any], Positions, list[str]]:
    """Takes `--callbacks.NAME.ARGUMENT=VALUE` and `--callbacks.-NAME` out of the arguments.

    A callback that `--trainer.callbacks+=NAME` adds, and that one of them changes, is taken with them.

    Returns:
        The changes by name, the place of each, and the other arguments.

    Raises:
        ConfigError: If one has no argument's name or no value.
    """
    changes: dict[str, Any] = {}
    places: Positions = {}
    rest = []
    words = iter(arguments)
    for word in words:
        option, equals, text = word.partition("=")
        name, _, argument = (
            option.removeprefix("--trainer.").removeprefix("--").removeprefix("callbacks.").partition(".")
        )
        by_name = option.startswith("--callbacks.") or (
            option.startswith("--trainer.callbacks.") and (name[:1] == "-" or name[:1].isupper())
        )
        if not by_name:
            rest.append(word)
        elif name.startswith("-") and not argument and not equals:
            changes[name[1:]], places[(name[1:],)] = None, option
        else:
            value = text if equals else next(words, None)
            if not argument or value is None:
                raise ConfigError(
                    f"{word}: write --callbacks.NAME.ARGUMENT=VALUE to change a callback, --callbacks.-NAME to "
                    "take it out,\n--trainer.callbacks+=NAME to add one."
                )
            _lay(changes, places, name, argument.split("."), parse(value), option)
    _drop_additions(rest, changes)
    return changes, places, rest


def _drop_additions(arguments: list[str], changes: dict[str, Any]) -> None:
    """Removes each `--trainer.callbacks+=NAME` of a callback that is changed, which adds it already; in place."""
    for at in reversed(range(len(arguments))):
        option, equals, name = arguments[at].partition("=")
        if option == "--trainer.callbacks+" and (equals or at + 1 < len(arguments)):
            name = name if equals else arguments[at + 1]
            if changes.get(name.rpartition(".")[2]) is not None:
                del arguments[at : at + (1 if equals else 2)]


def _lay(
    changes: dict[str, Any], places: Positions, name: str, keys: list[str], value: Any, option: str
) -> None:
    places.setdefault((name,), option)
    places[(name, *keys)] = option
    target = changes[name] = changes.get(name) or {}
    for key, following in pairwise(keys):
        if isinstance(target.get(key), str):  # a class, which an argument before this one has named
            target[key] = {"class_path": target[key]}
        target = target.setdefault(key, {})
        if "class_path" in target and following not in OF_A_CLASS:
            target = target.setdefault("init_args", {})
    target[keys[-1]] = value
