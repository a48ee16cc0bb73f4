"""Deprecated: `toolkit.selection`; this name of it works until version 1.5 of the core's API."""

from typing import Any


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from core.errors import deprecated

    if name not in ("Run", "Selected"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    deprecated(f"core.selection.{name}", f"toolkit.selection.{name}")
    return getattr(import_module("toolkit.selection"), name)
