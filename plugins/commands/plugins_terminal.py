"""What the small commands share: a parser as kind as the rest of the command line, and tables."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
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


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Returns an argument type that takes these words and names the nearest to any other."""

    def check(word: str) -> str:
        if word in words:
            return word
        raise argparse.ArgumentTypeError(
            f"there is no {word!r}.{nearest(word, set(words))}\nThere are {', '.join(words)}."
        )

    return check


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints rows, the header first, in columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]))
