"""Deprecated: the conformance kit is `conformance`; this name of it works until version 1.5 of the core's API."""

from typing import Any


def __getattr__(name: str) -> Any:
    import warnings
    from importlib import import_module

    kit = import_module("conformance")
    if name not in kit.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"core.testing.{name} is now conformance.{name}", DeprecationWarning, stacklevel=2)
    return getattr(kit, name)
