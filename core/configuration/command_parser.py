"""The parser of commands that have options of their own: as kind as that of `fit`."""

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
        raise ConfigError(f"{self.prog}: {message}\nSee `{self.prog} --help`.")
