"""Deprecated: the pytest plugin is `conformance.pytest_plugin`, which pytest loads by itself."""

from conformance.pytest_plugin import *  # noqa: F403 - the hooks, where plugins are loaded by name alone
from core.errors import deprecated

deprecated("core.testing.pytest_plugin", "conformance.pytest_plugin")
