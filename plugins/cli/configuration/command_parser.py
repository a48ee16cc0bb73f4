"""The parser of commands that have options of their own.

It adds two things to argparse: a mistake is a ConfigError of a few lines with the nearest right word, as for `fit`, and a
docstring is printed as it is written. typer 0.29 prints the usage and a frame of its own instead, ends the process by
itself, and costs 0.03 s more to import; what completes our command lines reads calls of `add_argument` from the source.
"""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any, NoReturn

from core.errors import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """Prints a docstring as it is written, and reports a mistake as a ConfigError instead of the usage."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=inspect.cleandoc(description or ""), **options)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print, with the nearest of the choices where there are some."""
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += "." + nearest(found[1], set(re.findall(r"[\w-]+", found[2])))
        elif found := re.search(r"unrecognized arguments:.*?(--[^\s=]+)", message):
            message += "." + nearest(found[1], self.known_options())
        raise ConfigError(f"{self.prog}: {message}\nSee `{self.prog} --help`.")

    def known_options(self) -> set[str]:
        """Returns the options of this command and of its subcommands."""
        found = {word for word in self._option_string_actions if word.startswith("--")}
        for action in self._actions:
            choices = action.choices if isinstance(action, argparse._SubParsersAction) else {}
            found |= {word for parser in choices.values() for word in parser.known_options()}
        return found
