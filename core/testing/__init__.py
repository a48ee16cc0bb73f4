"""Deprecated: the conformance kit is `conformance`; this name of it works until version 1.5 of the core's API."""

from core.errors import moved

__getattr__ = moved(__name__, "conformance")
