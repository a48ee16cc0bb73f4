"""Finds, reads and composes YAML configs before jsonargparse sees them.

What this adds to jsonargparse: configs by name from any folder, `base:` includes, one merge rule from
left to right (`key+:` appends to a list), duplicate keys as errors, and the file and line of every value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from core.catalog import configs_folder
from core.errors import ConfigError, nearest

Path_ = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as YAML 1.2 and jsonargparse do."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


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
    hint = nearest(names[1].removesuffix(".yaml"), known)
    where = f"{beside} and " if beside else ""
    raise ConfigError(f"There is no config file {name!r}; looked in {where}{Path.cwd()} and {shipped}.{hint}")


def compose(names: list[str]) -> Composed:
    """Reads the named configs, includes first, and merges them from left to right."""
    result = Composed()
    for name in names:
        _include(result, find_config(name), ())
    return result


def _include(result: Composed, path: Path, including: tuple[Path, ...]) -> None:
    path = path.resolve()
    if path in including:
        chain = " -> ".join(file.name for file in (*including, path))
        raise ConfigError(f"{path}: includes itself through `base:` ({chain}). Take one of them out.")
    values, positions = read_yaml(path)
    base = values.pop("base", [])
    bases = [base] if isinstance(base, str) else base
    if not isinstance(bases, list) or not all(isinstance(item, str) for item in bases):
        raise ConfigError(f"{positions[('base',)]}: `base:` takes a file name or a list of them.")
    for item in bases:
        try:
            _include(result, find_config(item, beside=path.parent), (*including, path))
        except ConfigError as error:
            if str(error).startswith("There is no config file"):
                raise ConfigError(f"{positions[('base',)]}: {error}") from None
            raise
    merge(result.values, values)
    result.positions.update(positions)
    result.files.append(path)


def merge(target: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Merges `update` into `target` and returns it: mappings deeply, all else replaced.

    `key+` appends to the list at `key`. Two mappings that name different classes do not mix: the
    later one replaces the earlier, whose arguments mean nothing to it.
    """
    for key, value in update.items():
        if isinstance(key, str) and key.endswith("+"):
            old = target.get(key[:-1]) or []
            items = value if isinstance(value, list) else [value]
            target[key[:-1]] = [*(old if isinstance(old, list) else [old]), *items]
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            old_class, new_class = target[key].get("class_path"), value.get("class_path")
            if new_class is not None and old_class is not None and old_class != new_class:
                target[key] = merge({}, value)
            else:
                merge(target[key], value)
        elif isinstance(value, dict):
            target[key] = merge({}, value)
        else:
            target[key] = value
    return target


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
    loader = _Loader(text)
    positions: dict[Path_, str] = {}
    try:
        node = loader.get_single_node()
        values = _construct(loader, node, (), origin, positions) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line}: this is not YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: this is not YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{origin}:1: a config is a mapping (`key: value`), this is a {type(values).__name__}."
        )
    return values, positions


def _construct(
    loader: _Loader, node: yaml.Node, path: Path_, origin: str, positions: dict[Path_, str]
) -> Any:
    positions[path] = f"{origin}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for repeated in {key for key in own if own.count(key) > 1}:
            line = [key for key, _ in node.value if key.value == repeated][-1].start_mark.line + 1
            raise ConfigError(f"{origin}:{line}: {repeated!r} stands here twice; keep one of the two.")
        loader.flatten_mapping(node)
        result = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(
                    f"{origin}:{key_node.start_mark.line + 1}: the key {key!r} is not a string."
                )
            value = _construct(loader, value_node, (*path, key), origin, positions)
            positions[(*path, key)] = f"{origin}:{key_node.start_mark.line + 1}"
            result[key] = value
        return result
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(loader, item, (*path, index), origin, positions)
            for index, item in enumerate(node.value)
        ]
    return loader.construct_object(node, deep=True)
