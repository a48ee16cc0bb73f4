"""Holds every class that a configuration names against the type of its place, before anything is called.

jsonargparse takes any callable where a type is `Callable[..., X]`: `os.system` for a network. A configuration may
come with a checkpoint from anywhere, so that only classes of the right kind are let through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.configuration import signatures
from core.configuration.mistakes import Checker, Keys
from core.configuration.signatures import Argument, class_types, is_callable


class ClassChecker(Checker):
    """Walks a parsed configuration and looks at its classes alone: the other values are jsonargparse's."""

    def section(self, target: Any, values: Any, keys: Keys) -> None:
        """Checks the classes among the arguments of a class whose path stands at `keys`."""
        if isinstance(values, Mapping):
            known, _ = signatures.parameters(target)
            for name, value in values.items():
                self.value(known.get(name, Argument(Any, None)).hint, value, (*keys, name))

    def value(self, hint: Any, value: Any, keys: Keys) -> None:
        """Checks the classes that a value names."""
        bases = class_types(hint)
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            found = self._named(bases or (object,), value["class_path"], (*keys, "class_path"))
            for part in ("init_args", "dict_kwargs"):
                self.section(found, value.get(part), (*keys, part))
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self.value(hint, item, (*keys, name))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.value(hint, item, (*keys, index))
        elif isinstance(value, str) and bases and _names_callables(hint):
            self._named(bases, value, keys)


def _names_callables(hint: Any) -> bool:
    """Returns whether a text is taken as the path of something to call."""
    return is_callable(hint) or any(_names_callables(part) for part in getattr(hint, "__args__", ()))


def check_classes(config: Mapping[str, Any], where: Callable[[Keys], str]) -> None:
    """Raises a ConfigError for the first class of a parsed configuration that does not belong in its place.

    Args:
        config: The parsed configuration, classes by their full paths.
        where: Gives the place in which a value was written.
    """
    checker = ClassChecker(where)
    for name, target in signatures.sections().items():
        if name == "data":
            checker.value(target, config.get(name), (name,))
        else:
            checker.section(target, config.get(name), (name,))
