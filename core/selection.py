"""Deprecated: `toolkit.selection`; this name of it works until version 1.5 of the core's API."""

from core.errors import former

__getattr__ = former("core.selection", "toolkit.selection")
