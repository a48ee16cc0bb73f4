"""Deprecated: `core.durable`, and `toolkit.local_paths`; this name works until version 1.5 of the core's API."""

from core.errors import moved

__getattr__ = moved(__name__, "core.durable", "toolkit.local_paths")
