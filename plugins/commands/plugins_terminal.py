"""What the small commands share: words that are options, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from core.errors import nearest


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
