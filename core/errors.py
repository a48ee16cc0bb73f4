"""Errors that users cause and can correct: shown as a few lines, never as a traceback."""

from collections.abc import Callable
from typing import Any

__all__ = ["ConfigError", "deprecated", "nearest"]


class ConfigError(Exception):
    """A mistake in a configuration, an argument, an input file or the environment.

    The command line prints the message (at most 10 lines) and ends with exit code 2. Write the
    message for the person who has to correct it: where, what was found, the nearest right thing, what
    to do.

    Attributes:
        exit_code: What the command ends with.
    """

    exit_code = 2


def deprecated(old: str, new: str, level: int = 3) -> None:
    """Warns that a name is used that goes with the next minor version of the API; the caller of the caller used it."""
    import warnings

    warnings.warn(f"{old} is deprecated and goes with core API 1.5: use {new}.", DeprecationWarning, level)


def moved(module: str, *to: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module of which all public names are in others now."""

    def get(name: str) -> Any:
        from importlib import import_module

        for new in map(import_module, to):
            if name in new.__all__:
                deprecated(f"{module}.{name}", f"{new.__name__}.{name}")
                return getattr(new, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def nearest(word: str, candidates: list[str] | tuple[str, ...] | set[str]) -> str:
    """Returns ' Did you mean X?' for the most similar candidate, else the first that begins so; or an empty string."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in sorted(candidates)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    close = close or [name for name in by_lower if len(word) > 2 and name.startswith(word.lower())]
    return f" Did you mean {by_lower[close[0]]}?" if close else ""
