"""Deprecated: the conformance kit is `conformance`; this name of it works until version 1.5 of the core's API."""

from typing import Any


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from core.errors import deprecated

    kit = import_module("conformance")
    if name not in kit.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    deprecated(f"core.testing.{name}", f"conformance.{name}")
    return getattr(kit, name)
