"""Former names of modules, which are deprecated."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from core.errors import deprecated


def former(old: str, new: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for the former name of a module: finds what is public in the new one, with a warning."""

    def find(name: str) -> Any:
        if name not in (module := import_module(new)).__all__:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        deprecated(f"{old}.{name}", f"{new}.{name}")
        return getattr(module, name)

    return find
