"""Finds, reads and composes YAML configs before jsonargparse sees them.

What this adds to jsonargparse: configs by name from any folder, `base:` includes, one merge rule from
left to right (`key+:` appends to a list), duplicate keys as errors, and the file and line of every value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from core.catalog import configs_folder, qualify
from core.configuration.named_callbacks import LISTS, change, is_by_name
from core.errors import ConfigError, nearest

Path_ = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as YAML 1.2 does, and 10:00:00 or 2026-01-31 as text."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text like 1e3, which jsonargparse would read as a number."""


_INTEGER = (  # YAML 1.1's but for 10:00:00, which is base 60 there
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][\d_]*|0[0-7_]+|0b[01][01_]*|0x[\da-fA-F][\da-fA-F_]*)$"),
)
_SCIENTIFIC = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
)
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("timestamp", "int")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(*_INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(*_SCIENTIFIC, list("-+0123456789."))
_Dumper.add_implicit_resolver(*_SCIENTIFIC, list("-+0123456789."))


@dataclass
class Composed:
    """A composed configuration and where each of its values was written.

    Attributes:
        values: The merged mapping.
        positions: Path of keys -> "file:line".
        files: Every file that was read, includes first.
    """

    values: dict[str, Any] = field(default_factory=dict)
    positions: dict[Path_, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


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
                if path.is_file():
                    return path
    known = {str(path.relative_to(shipped).with_suffix("")) for path in shipped.rglob("*.yaml")}
    for folder in folders[:-1]:
        known |= {str(Path(name).with_name(path.stem)) for path in (folder / name).parent.glob("*.yaml")}
    hint = nearest(names[1].removesuffix(".yaml"), known)
    where = f"{beside} and " if beside else ""
    raise ConfigError(f"There is no config file {name!r}; looked in {where}{Path.cwd()} and {shipped}.{hint}")


def compose(names: list[str], below: Mapping[str, Any] | None = None, strict: bool = True) -> Composed:
    """Reads the named configs, includes first, and merges them from left to right over `below`.

    Args:
        names: Files, or names of shipped configs.
        below: What lies below them, such as a checkpoint's configuration.
        strict: Whether taking out by name what is not there is an error.
    """
    result = Composed(merge({}, below or {}))
    for name in names:
        _include(result, find_config(name), (), strict)
    return result


def _include(result: Composed, path: Path, including: tuple[Path, ...], strict: bool) -> None:
    path = path.resolve()
    if path in including:
        chain = " -> ".join(file.name for file in (*including, path))
        raise ConfigError(f"{path}: includes itself through `base:` ({chain}). Take one of them out.")
    values, positions = read_yaml(path)
    if path.is_relative_to(configs_folder()):
        qualify(values, package="leyden")  # another package's namesake does not break what ships here
    base = values.pop("base", [])
    bases = [base] if isinstance(base, str) else base
    if not isinstance(bases, list) or not all(isinstance(item, str) for item in bases):
        raise ConfigError(f"{positions[('base',)]}: `base:` takes a file name or a list of them.")
    for item in bases:
        try:
            _include(result, find_config(item, beside=path.parent), (*including, path), strict)
        except ConfigError as error:
            if str(error).startswith("There is no config file"):
                raise ConfigError(f"{positions[('base',)]}: {error}") from None
            raise
    # a section with nothing in it, all its lines commented out, takes nothing away
    values = {
        k: v for k, v in values.items() if v is not None or not isinstance(result.values.get(k, {}), dict)
    }
    section = values.get("trainer")
    trainer: dict[str, Any] = section if isinstance(section, dict) else {}
    for key in LISTS:
        if is_by_name(trainer.get(key)):
            head = ("trainer", key)
            places = {at[2:]: line for at, line in positions.items() if at[:2] == head}
            positions = {at: line for at, line in positions.items() if at[:2] != head}
            change(result.values, result.positions, trainer.pop(key), places, merge, key, strict)
    _place(result, values, {at: line for at, line in positions.items() if not at or at[0] in values})
    merge(result.values, values)
    result.files.append(path)


def _place(result: Composed, values: Mapping[str, Any], positions: dict[Path_, str]) -> None:
    """Notes where values stand that are about to be merged, and forgets where what they replace stood."""
    placed = {at: _merged_path(at, result.values) for at in positions}
    get: Any = getitem
    replaced = {placed[at] for at in positions if not isinstance(reduce(get, at, values), dict)}
    kept = {
        at: line
        for at, line in result.positions.items()
        if not any(at[:count] in replaced for count in range(len(at)))
    }
    result.positions = kept | {placed[at]: line for at, line in positions.items()}


def _merged_path(path: Path_, target: Any) -> Path_:
    """Returns where a value will stand in `target`: the items of `key+` behind those at `key`."""
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


def parse_value(text: str) -> Any:
    """Returns what a value on the command line means, by the same rules as in a file."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        return text


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Returns YAML that jsonargparse reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Path_, str]]:
    """Returns a YAML file's mapping and the "file:line" of each of its values.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, is no mapping, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, origin: str) -> tuple[dict[str, Any], dict[Path_, str]]:
    """Like :func:`read_yaml`, from text; `origin` stands for the file in messages."""
    positions: dict[Path_, str] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values = _construct(loader, node, (), origin, positions) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line}: this is not YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: this is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(values, dict | None):
        raise ConfigError(
            f"{origin}:1: a config is a mapping (`key: value`), this is a {type(values).__name__}."
        )
    return values or {}, positions


def _construct(
    loader: _Loader, node: yaml.Node, path: Path_, origin: str, positions: dict[Path_, str]
) -> Any:
    positions[path] = f"{origin}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode) and node.tag == loader.DEFAULT_MAPPING_TAG:
        _check_keys(node, origin)
        loader.flatten_mapping(node)
        # `<<` put merged pairs before ours; an alias brings the same node here again, so drop them for good
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
        result = {}
        for key_node, value_node in node.value:
            line = f"{origin}:{key_node.start_mark.line + 1}"
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise ConfigError(
                    f"{line}: the key {key_node.value} means {key!r} in YAML; put it in quotes."
                )
            result[key] = _construct(loader, value_node, (*path, key), origin, positions)
            positions[(*path, key)] = line
        return result
    if isinstance(node, yaml.SequenceNode) and node.tag == loader.DEFAULT_SEQUENCE_TAG:
        return [
            _construct(loader, item, (*path, index), origin, positions)
            for index, item in enumerate(node.value)
        ]
    return loader.construct_object(node, deep=True)


def _check_keys(node: yaml.MappingNode, origin: str) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        line = f"{origin}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key is a word; this one is a list or a mapping.")
        if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            raise ConfigError(f"{line}: {key.value!r} stands here twice; keep one of the two.")
        seen.add(key.value)
