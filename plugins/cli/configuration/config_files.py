"""Finds configs, reads them with their includes, and merges them before jsonargparse sees them.

What this adds to jsonargparse: configs by name from any folder, `base:` includes, and one merge rule from left to right
(`key+:` appends to a list).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from core.errors import ConfigError, nearest
from plugins.cli.configuration.class_paths import qualify
from plugins.cli.configuration.named_callbacks import LISTS, change, is_by_name
from plugins.cli.configuration.yaml_texts import Keys, read_yaml


@dataclass
class Composed:
    """A composed configuration and where each of its values was written.

    Attributes:
        values: The merged mapping.
        positions: Path of keys -> "file:line".
        missing: A message for each item that is taken out by name and is not there.
    """

    values: dict[str, Any] = field(default_factory=dict)
    positions: dict[Keys, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass
class Layer:
    """What one config file says.

    Attributes:
        values: Its mapping, without `base:`.
        positions: Path of keys -> "file:line".
    """

    values: dict[str, Any]
    positions: dict[Keys, str]


def compose(names: list[str]) -> Composed:
    """Reads the named configs, includes first, and merges them from left to right.

    Raises:
        ConfigError: If a file is missing or wrong, or an item that is taken out by name is not there.
    """
    result = merge_layers(read_layers(names))
    if result.missing:
        raise ConfigError(result.missing[0])
    return result


def read_layers(names: Iterable[str]) -> list[Layer]:
    """Reads the named configs, files or names of shipped ones; what a config includes comes before it."""
    found: list[Layer] = []
    for name in names:
        _read(found, find_config(name), ())
    return found


def _read(found: list[Layer], path: Path, including: tuple[Path, ...]) -> None:
    path = path.resolve()
    # In messages: ../mine.yaml, not /home/me/mine.yaml.
    shown = min(os.path.relpath(path), str(path), key=len)
    if path in including:
        chain = " -> ".join(file.name for file in (*including, path))
        raise ConfigError(f"{shown}: includes itself through `base:` ({chain}). Take one of them out.")
    values, positions = read_yaml(Path(shown))
    if path.is_relative_to(configs_folder()):
        qualify(values, package="leyden")  # another package's namesake does not break what ships here
    base = values.pop("base", [])
    bases = [base] if isinstance(base, str) else base
    if not isinstance(bases, list) or not all(isinstance(item, str) for item in bases):
        raise ConfigError(f"{positions[('base',)]}: `base:` takes a file name or a list of them.")
    for item in bases:
        try:
            _read(found, find_config(item, beside=path.parent), (*including, path))
        except ConfigError as error:
            if str(error).startswith("There is no config file"):
                raise ConfigError(f"{positions[('base',)]}: {error}") from None
            raise
    found.append(Layer(values, positions))


def last_written(layers: list[Layer], *keys: str) -> str | None:
    """Returns the value at a path of keys as the last layer that has it says; None for none, or null."""
    for layer in reversed(layers):
        value: Any = layer.values
        for key in keys:
            value = value.get(key, layer) if isinstance(value, Mapping) else layer
        if value is not layer:
            return str(value) if value else None
    return None


def merge_layers(layers: Iterable[Layer], below: Mapping[str, Any] | None = None) -> Composed:
    """Merges layers, which are used up, from left to right over `below`, such as a checkpoint's configuration."""
    result = Composed(merge({}, below or {}))
    for layer in layers:
        _add(result, layer)
    return result


def _add(result: Composed, layer: Layer) -> None:
    positions = layer.positions
    # a section with nothing in it, all its lines commented out, takes nothing away
    values = {
        key: value
        for key, value in layer.values.items()
        if value is not None or not isinstance(result.values.get(key, {}), dict)
    }
    section = values.get("trainer")
    trainer: dict[str, Any] = section if isinstance(section, dict) else {}
    for key in LISTS:
        if is_by_name(trainer.get(key)):
            head = ("trainer", key)
            places = {at[2:]: line for at, line in positions.items() if at[:2] == head}
            positions = {at: line for at, line in positions.items() if at[:2] != head}
            change(result.values, result.positions, trainer.pop(key), places, merge, key, result.missing)
    _place(result, values, {at: line for at, line in positions.items() if not at or at[0] in values})
    merge(result.values, values)


def find_config(name: str, beside: Path | None = None) -> Path:
    """Returns the file that a `--config` or `base:` value means.

    Looked for, in this order: beside the including file, in the working directory, among the configs
    that ship with leyden; each as written and with `.yaml` appended.

    Raises:
        ConfigError: If there is none; names the nearest.
    """
    folders = [*([beside] if beside else []), Path.cwd(), configs_folder()]
    shipped = configs_folder()
    names = [name, name.removeprefix("configs/")]
    for folder in folders:
        for candidate in names if folder == shipped else names[:1]:
            for path in (folder / candidate, folder / f"{candidate}.yaml"):
                with suppress(OSError):  # of a name that is too long
                    if path.is_file():
                        return path
    known = {str(path.relative_to(shipped).with_suffix("")) for path in shipped.rglob("*.yaml")}
    for folder in folders[:-1] if Path(name).name not in ("", "..") and len(name) < 1_000 else ():
        known |= {str(Path(name).with_name(path.stem)) for path in (folder / name).parent.glob("*.yaml")}
    hint = nearest(names[1].removesuffix(".yaml"), known)
    if any(_is_folder(folder / name) for folder in folders):
        raise ConfigError(f"There is no config file {name!r}: that is a folder. Name a file in it.{hint}")
    where = " and ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(f"There is no config file {name!r}; looked in {where}.{hint}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # of a name that is too long, or has a NUL
        return False


def configs_folder() -> Path:
    """The folder of the configs that ship with leyden: in the checkout, or inside site-packages."""
    return Path(__file__).resolve().parents[3] / "configs"


def _place(result: Composed, values: Mapping[str, Any], positions: dict[Keys, str]) -> None:
    """Notes the positions of values that are about to be merged, and drops those of the values they replace."""
    placed = {at: _merged_path(at, result.values) for at in positions}
    get: Any = getitem
    replaced = {placed[at] for at in positions if not isinstance(reduce(get, at, values), dict)}
    kept = {
        at: line
        for at, line in result.positions.items()
        if not any(at[:count] in replaced for count in range(len(at)))
    }
    result.positions = kept | {placed[at]: line for at, line in positions.items()}


def _merged_path(path: Keys, target: Any) -> Keys:
    """Returns the path that a value will have in `target`: the items of `key+` behind those at `key`."""
    for index, key in enumerate(path):
        if isinstance(key, str) and key.endswith("+"):
            old = (target.get(key[:-1]) if isinstance(target, dict) else None) or []
            count, rest = len(old) if isinstance(old, list) else 1, path[index + 1 :]
            item, rest = (rest[0], rest[1:]) if rest and isinstance(rest[0], int) else (0, rest)
            return (*path[:index], key[:-1], count + item, *rest)
        target = target.get(key) if isinstance(target, dict) else None
    return path


def merge(target: dict[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `update` into `target` and returns it: mappings deeply, all else replaced.

    `key+` appends to the list at `key`. Two mappings that name different classes do not mix: the
    later one replaces the earlier, whose arguments mean nothing to it. A class that is written as a
    plain name counts as a mapping with that `class_path`.
    """
    for key, value in update.items():
        old = target.get(key)
        if isinstance(value, str) and isinstance(old, dict) and _same_class(old.get("class_path"), value):
            continue
        if isinstance(old, str) and isinstance(value, dict) and "init_args" in value:
            target[key] = {"class_path": old}
        if isinstance(key, str) and key.endswith("+"):
            first = target.get(key[:-1]) or []
            items = value if isinstance(value, list) else [value]
            target[key[:-1]] = [*(first if isinstance(first, list) else [first]), *items]
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            old_class, new_class = target[key].get("class_path"), value.get("class_path")
            if None not in (old_class, new_class) and not _same_class(old_class, new_class):
                target[key] = merge({}, value)
            else:
                merge(target[key], value)
        elif isinstance(value, dict):
            target[key] = merge({}, value)
        else:
            target[key] = value
    return target


def _same_class(one: Any, other: Any) -> bool:
    """Whether two spellings are equal, or one is the short name at the end of the other's full path."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
