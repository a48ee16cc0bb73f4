"""JSON schemas of Python types: of plain values, and of places where a class is chosen with its arguments."""

from __future__ import annotations

import enum
import os
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import PurePath
from typing import Any

from core import catalog
from plugins.cli.configuration.class_names import Bases, names_for
from plugins.cli.configuration.docstrings import described, summary
from plugins.cli.configuration.signatures import REQUIRED, class_types, is_callable, parameters, takes_list

Schema = dict[str, Any]

PATH: Schema = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"}
"""The full path of a class or function: any, also one of a package that is not here."""

_ANY_CLASS: Schema = {"type": "object", "required": ["class_path"]}
_PLAIN: dict[Any, Schema] = {
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    timedelta: {"type": "string"},
}
_LISTS = ("list", "set", "frozenset", "tuple", "Iterable", "Sequence", "Collection")
_OURS = ("lightning.", "torch.optim.")
"""Where classes live that a short name may mean without being registered."""


class Builder:
    """Makes schemas; what several places share is made once and referred to.

    Args:
        loaded: Full path -> class, of each registered technique that can be imported.

    Attributes:
        definitions: Name -> schema, for the `definitions` of the full schema.
    """

    def __init__(self, loaded: Mapping[str, Any]) -> None:
        self.loaded = loaded
        self.definitions: dict[str, Schema] = {}
        names = Counter((entry.kind, entry.name) for entry in catalog.entries())
        self._ambiguous = {name for (_, name), count in names.items() if count > 1}

    def argument(self, hint: Any, default: Any = REQUIRED, text: str = "") -> Schema:
        """Returns the schema of an argument: its type, default and description."""
        schema: Schema = {"description": text} if text else {}
        if is_plain(default):
            schema["default"] = list(default) if isinstance(default, tuple) else default
        # `anyOf` also for one form: with `type` beside `default`, editors write all defaults out at once
        return schema | {"anyOf": self.alternatives(hint)}

    def alternatives(self, hint: Any) -> list[Schema]:
        """Returns one schema for each form that a value of this type may have."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            classes = tuple(kind for kind in inner if typing.get_origin(kind) is None and class_types(kind))
            found = [schema for part in inner if part not in classes for schema in self.alternatives(part)]
            found += self._named(classes, 0) if classes else []
            return [schema for index, schema in enumerate(found) if schema not in found[:index]]
        if origin is typing.Literal:
            return [{"enum": list(inner)}]
        if is_callable(hint):
            given = len(inner[0]) if inner and isinstance(inner[0], list) else 0
            classes = class_types(hint)
            return self._named(classes, given) if classes else [PATH, _ANY_CLASS]
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return [{"enum": [member.name for member in hint]}]
        if hint in _PLAIN:
            return [_PLAIN[hint]]
        if isinstance(hint, type) and issubclass(hint, PurePath | os.PathLike):
            return [_PLAIN[str]]
        return self._container(origin or hint, inner) or self._class(hint)

    def _container(self, origin: Any, inner: tuple[Any, ...]) -> list[Schema]:
        name = getattr(origin, "__name__", "")
        if name == "tuple" and inner and inner[-1] is not ...:
            parts = [self.argument(part) for part in inner]
            return [{"type": "array", "items": parts, "minItems": len(parts), "maxItems": len(parts)}]
        if name in _LISTS:
            return [{"type": "array", "items": self.argument(inner[0]) if inner else {}}]
        if name in ("dict", "Mapping", "MutableMapping", "OrderedDict"):
            keys = {"propertyNames": {"pattern": r"^[+-]?\d+$"}} if inner and inner[0] is int else {}
            return [
                {"type": "object", "additionalProperties": self.argument(inner[1]) if inner else {}, **keys}
            ]
        return []

    def _class(self, hint: Any) -> list[Schema]:
        classes = class_types(hint) if isinstance(hint, type) else ()
        return self._named(classes, 0) if classes else [{}]

    # -- classes ----------------------------------------------------------------------------------

    def _named(self, bases: Bases, given: int) -> list[Schema]:
        """Returns the forms in which one of several classes is chosen."""
        if not (classes := self._fitting(bases)):
            return [PATH, _ANY_CLASS]
        key = "-or-".join(_path(base) for base in bases) + (f"-given-{given}" if given else "")
        if key not in self.definitions:
            self.definitions[key] = {}  # holds the place: a class may take others of its kind
            title = " or ".join(base.__name__ for base in bases)
            self.definitions[key] = {"title": title, **self._choice(classes, given)}
        texts = [summary(kind) for kind in classes.values()]
        return [{"enum": list(classes), "enumDescriptions": texts}, PATH, {"$ref": f"#/definitions/{key}"}]

    def _choice(self, classes: Mapping[str, type], given: int) -> Schema:
        texts = [summary(kind) for kind in classes.values()]
        names = {"enum": list(classes), "enumDescriptions": texts}
        return {
            "type": "object",
            "properties": {
                "class_path": {"description": "Short name or full path.", "anyOf": [names, PATH]},
                "init_args": {"type": ["object", "null"], "description": "Its arguments."},
                "dict_kwargs": {
                    "type": "object",
                    "description": "Arguments that its signature does not name.",
                },
            },
            "additionalProperties": False,
            "allOf": [
                {
                    "if": {
                        "properties": {"class_path": {"enum": spellings(name, kind)}},
                        "required": ["class_path"],
                    },
                    "then": {"properties": {"init_args": self.arguments(kind, given)}},
                }
                for name, kind in classes.items()
            ],
        }

    def arguments(self, target: Any, given: int = 0) -> Schema:
        """Returns a reference to the schema of a class's arguments, but for those that the run supplies."""
        key = f"{_path(target)}-arguments" + (f"-given-{given}" if given else "")
        if key not in self.definitions:
            self.definitions[key] = {}
            found, takes_more = parameters(target)
            texts = described(target)
            properties: dict[str, Schema] = {}
            for name, argument in list(found.items())[given:]:
                properties[name] = self.argument(argument.hint, argument.default, texts.get(name, ""))
                if takes_list(argument.hint):
                    properties[f"{name}+"] = self._appended(argument.hint, name)
            self.definitions[key] = {
                "title": target.__name__,
                "type": ["object", "null"],
                "description": summary(target),
                "properties": properties,
                "additionalProperties": takes_more,
            }
        return {"$ref": f"#/definitions/{key}"}

    def by_name(self, bases: Bases) -> Schema:
        """Returns the schema of a mapping from the name of a class to its arguments, or to null."""
        by_path: dict[str, Schema] = {}
        by_name = {}
        for name, kind in self._fitting(bases).items():
            by_name[name] = self.arguments(kind)
            by_path |= {f"^{re.escape(path)}$": by_name[name] for path in spellings(name, kind)[1:]}
        return {
            "type": "object",
            "properties": by_name,
            "patternProperties": {PATH["pattern"]: {"type": ["object", "null"]}, **by_path},
            "additionalProperties": False,
        }

    def _appended(self, hint: Any, name: str) -> Schema:
        lists = [schema for schema in self.alternatives(hint) if schema.get("type") == "array"]
        items = [item for schema in lists for item in schema["items"].get("anyOf", [schema["items"]])]
        return {"description": f"Appended to `{name}`.", "anyOf": [*lists, *items]}

    def _fitting(self, bases: Bases) -> dict[str, type]:
        """Returns short name -> class, of each that a short name can mean here."""
        found = {}
        for name, path in names_for(bases).items():
            kind = self.loaded.get(path)
            if kind is None and path.startswith(_OURS) and "._" not in path:
                module, _, attribute = path.rpartition(".")
                kind = getattr(import_module(module), attribute, None)
            if isinstance(kind, type) and issubclass(kind, bases) and name not in self._ambiguous:
                found[name] = kind
        return dict(sorted(found.items()))


def spellings(name: str, kind: type) -> list[str]:
    """Returns the names that mean a class: the short one, and the full path from each package that has it."""
    full, parts = _path(kind), kind.__module__.split(".")
    parents = [".".join(parts[:count]) for count in range(1, len(parts))]
    exported = [
        f"{parent}.{kind.__name__}"
        for parent in parents
        if getattr(sys.modules.get(parent), kind.__name__, None) is kind
    ]
    return list(dict.fromkeys([name, full, *exported]))


def is_plain(value: Any) -> bool:
    """Returns whether a default can be written as JSON."""
    if isinstance(value, float):
        return value - value == 0  # neither infinite nor NaN
    if isinstance(value, Sequence) and not isinstance(value, str):
        return isinstance(value, list | tuple) and all(is_plain(item) for item in value)
    return value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum))


def _path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"
