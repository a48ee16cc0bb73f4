"""Reads and writes the YAML of configs, with the file and line of every value.

What this adds to PyYAML: bounds on size and depth, duplicate keys as errors, numbers as in YAML 1.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError

Keys = tuple[str | int, ...]
"""The path of keys to a value of a configuration."""


MAX_BYTES = 2**19
MAX_VALUES = 10_000
MAX_DEPTH = 64
MAX_DIGITS = 100
"""Far beyond any configuration. Aliases count each time: nine lines of them may mean a billion values."""

_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "value", "merge")}


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that a config may not hold."""

    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as YAML 1.2 does, and 10:00:00 or 2026-01-31 as text; bounded."""

    depth = count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Composes a node, unless there are too many of them, or it lies too deep."""
        event: Any = self.peek_event()
        self.depth += 1
        self.add(1, event)
        if self.depth > MAX_DEPTH:
            raise _Refused(f"this is nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_DIGITS and node.tag in _NUMBERS:
            raise _Refused(f"this number has {len(node.value):,} digits, more than {MAX_DIGITS}", event)
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Refuses a bracket that lies too deep: PyYAML reads 1,024 ahead, each in the time of all that are open."""
        if self.flow_level >= MAX_DEPTH:
            raise _Refused(f"this is nested more than {MAX_DEPTH} deep", yaml.Token(self.get_mark(), None))
        super().fetch_flow_collection_start(TokenClass)

    def add(self, count: int, at: Any) -> None:
        """Counts values; raises if there are too many."""
        self.count += count
        if self.count > MAX_VALUES:
            raise _Refused(f"this config holds more than {MAX_VALUES:,} values", at)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts in what `<<` merges, each key once: a chain of merges cannot grow beyond its keys."""
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                continue
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    self.add(len(part.value), key)
        super().flatten_mapping(node)
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Refused("a key is a word; this one is a list or a mapping", key)
        # `<<` put merged pairs before ours; an alias brings the same node here again, so drop them for good
        node.value = list({key.value: (key, value) for key, value in node.value}.values())


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text like 1e3, which jsonargparse would parse as a number."""


_INTEGER = (  # YAML 1.1's but for 10:00:00, which is base 60 there
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][\d_]*|0[0-7_]+|0b[01][01_]*|0x[\da-fA-F][\da-fA-F_]*)$"),
)
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
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


def parse_value(text: str) -> Any:
    """Returns what a value on the command line means, by the same rules as in a file."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


_SUSPECT = re.compile(r"\*\w|(?:[-?:]\s+){32}|[\[{](?:[^\[{]*[\[{]){32}")


def bounded(loader: Any) -> Any:
    """Returns a YAML loader that refuses, by a YAMLError, what is refused in a config's file; else as `loader`.

    jsonargparse reads texts with it where they may be lists or mappings. It is written in C, too, where it can be, and
    has no bounds.
    """

    class Bounded(loader):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            if isinstance(stream, str) and len(stream) > MAX_BYTES:
                raise yaml.YAMLError("this is too long")
            if isinstance(stream, str) and _SUSPECT.search(stream):
                first = _Loader(stream)
                try:
                    if (node := first.get_single_node()) is not None and _expanded(node, {}) > MAX_VALUES:
                        raise _Refused(f"this holds more than {MAX_VALUES:,} values", node)
                except (RecursionError, ValueError) as error:
                    raise yaml.YAMLError(str(error)) from error
            super().__init__(stream)

    return Bounded


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Returns the number of values with aliases counted each time; infinite for one within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # as long as it is not known
        parts = (
            [part for pair in node.value for part in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        inner = () if isinstance(node, yaml.ScalarNode) else parts
        known[id(node)] = 1 + sum(_expanded(part, known) for part in inner)
    return known[id(node)]


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Returns YAML that jsonargparse reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Returns a YAML file's mapping and the "file:line" of each of its values.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, is no mapping, or repeats a key.
    """
    if path.exists() and not path.is_file():  # a pipe would block, a device never end
        raise ConfigError(f"{path} cannot be read: it is no regular file.")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode(
                errors="strict" if path.stat().st_size <= MAX_BYTES else "replace"
            )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, origin: str) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Like :func:`read_yaml`, from text; messages name `origin` instead of a file.

    A text that was parsed before is not parsed again: a resumed run needs its `config.yaml` in several places.
    """
    try:
        values, places = _parse(text)
    except ConfigError as error:
        raise ConfigError(f"{origin}{error}") from None
    return deepcopy(values), {keys: f"{origin}{place}" for keys, place in places.items()}


@lru_cache(maxsize=64)
def _parse(text: str) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Returns the values and the ":line" of each; a message begins with that of the line, or with ":"."""
    places: dict[Keys, str] = {}
    if len(text) > MAX_BYTES:
        raise ConfigError(f": this is not a config: it has more than {MAX_BYTES:,} characters.")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        loader.count = 0
        values = _construct(loader, node, (), places) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        if isinstance(error, _Refused):
            raise ConfigError(f"{line}: {error.problem}.") from None
        raise ConfigError(f"{line}: this is not YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f": this is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f":1: a config is a mapping (`key: value`), this is a {type(values).__name__}.")
    return values or {}, places


def _construct(loader: _Loader, node: yaml.Node, path: Keys, places: dict[Keys, str]) -> Any:
    places[path] = f":{node.start_mark.line + 1}"
    loader.add(1, node)
    if len(path) > MAX_DEPTH:
        raise _Refused(f"this is nested more than {MAX_DEPTH} deep", node)
    if isinstance(node, yaml.MappingNode) and node.tag == loader.DEFAULT_MAPPING_TAG:
        _check_keys(node)
        loader.flatten_mapping(node)
        result = {}
        for key_node, value_node in node.value:
            line = f":{key_node.start_mark.line + 1}"
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise ConfigError(
                    f"{line}: the key {key_node.value[:80]} means {key!r} in YAML; put it in quotes."
                )
            result[key] = _construct(loader, value_node, (*path, key), places)
            places[(*path, key)] = line
        return result
    if isinstance(node, yaml.SequenceNode) and node.tag == loader.DEFAULT_SEQUENCE_TAG:
        return [_construct(loader, item, (*path, index), places) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN:
        tag = node.tag.rpartition(":")[2][:40]
        raise yaml.MarkedYAMLError(
            problem=f"a config has no values with the tag {tag!r}", problem_mark=node.start_mark
        )
    return loader.construct_object(node, deep=True)


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        line = f":{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key is a word; this one is a list or a mapping.")
        if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            raise ConfigError(f"{line}: {key.value[:80]!r} is here twice; keep one of the two.")
        seen.add(key.value)
