"""Calls the classes of a configuration for jsonargparse; on its own, as `prepare` builds without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import ConfigError


class Builder:
    """Calls classes for jsonargparse and notes what failed: its own error reports only the first of a union's.

    Args:
        finish: Changes each argument after parsing, before its class is called.

    Attributes:
        failed: The class that failed last, and its error.
    """

    def __init__(self, finish: Callable[[Any], Any] = lambda value: value) -> None:
        self.failed: tuple[Any, Exception] | None = None
        self._finish = finish

    def __call__(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what the class returns."""
        if None in kwargs.values():
            self._refuse_nulls(target, kwargs)
        try:
            return target(*args, **{name: self._finish(value) for name, value in kwargs.items()})
        except Exception as error:
            if self.failed is None or self.failed[1] is not error:  # the innermost is the culprit
                self.failed = target, error
            raise

    def _refuse_nulls(self, target: Any, arguments: Mapping[str, Any]) -> None:
        # jsonargparse lets null through for any type: a path of null would fail where it is used, during the run
        from plugins.cli.configuration.signatures import describe, parameters, takes_null

        known = parameters(target)[0]
        for name, value in arguments.items():
            argument = known.get(name)
            if value is None and argument and argument.default is not None and not takes_null(argument.hint):
                error = ConfigError(
                    f"{target.__name__}: {name} is null, not {describe(argument.hint)}. Leave it out for its default."
                )
                self.failed = target, error
                raise error
