"""Fixtures of tests/support/cli_runs.py."""

from tests.support.cli_runs import core, finished, trained  # noqa: F401
