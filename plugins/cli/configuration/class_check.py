"""Checks every class that a configuration names against the type of its argument, before anything is called.

jsonargparse takes any callable where a type is `Callable[..., X]`: `os.system` for a network. A configuration may
come with a checkpoint from anywhere, so that only classes of the right kind are let through, from modules that
:mod:`plugins.cli.configuration.trust` lets in. For a type that takes any value (`Any`, `dict`, `object`) no class is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plugins.cli.configuration import signatures, trust
from plugins.cli.configuration.mistakes import Checker, Keys
from plugins.cli.configuration.signatures import class_types, names_callables


class ClassChecker(Checker):
    """Walks a parsed configuration and looks at its classes alone: the other values are jsonargparse's."""

    def section(self, target: Any, values: Any, keys: Keys) -> None:
        """Checks the classes among the arguments of a class that is named at `keys`."""
        if isinstance(values, Mapping):
            for name, value in values.items():
                if isinstance(value, Mapping | list | tuple | str):
                    self.value(signatures.hint_of(target, name), value, (*keys, name))

    def value(self, hint: Any, value: Any, keys: Keys) -> None:
        """Checks the classes that a value names."""
        bases, function = class_types(hint), names_callables(hint)
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            at = (*keys, "class_path")
            if not bases and not function:
                self._fail(
                    at,
                    f"{keys[-1] if keys else 'this'} takes a plain value, not a class: {value['class_path']} is not built.",
                )
            found = self._named(bases, value["class_path"], at)
            for part in ("init_args", "dict_kwargs"):
                self.section(found, value.get(part), (*keys, part))
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self.value(hint, item, (*keys, name))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.value(hint, item, (*keys, index))
        elif isinstance(value, str) and function and not self._is_text(hint, value):
            self._named(bases, value, keys)

    def _is_text(self, hint: Any, value: str) -> bool:
        """Returns whether a value is a text, for a type that takes texts and functions."""
        return signatures.takes_text(hint) and ("." not in value or trust.refusal(value) is not None)


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
