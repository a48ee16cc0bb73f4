"""A check that evaluations share."""

from __future__ import annotations

from core.errors import ConfigError


def check_counts(evaluation: str, **counts: int | None) -> None:
    """Raises a ConfigError if one of an evaluation's numbers is below 1; None is no number."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{evaluation}.{name}={value} must be at least 1.")
