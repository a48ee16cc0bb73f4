"""Deprecated: the pytest plugin is `conformance.pytest_plugin`, which pytest loads by itself."""

import warnings

from conformance.pytest_plugin import *  # noqa: F403 - the hooks, where plugins are loaded by name alone

warnings.warn("core.testing.pytest_plugin is now conformance.pytest_plugin", DeprecationWarning, stacklevel=2)
