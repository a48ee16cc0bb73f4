"""Deprecated: `toolkit.selection`; this name of it works until version 1.5 of the core's API."""

from core.former_names import former

__getattr__ = former("core.selection", "toolkit.selection")
