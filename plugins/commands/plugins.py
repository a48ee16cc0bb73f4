"""The command `plugins list`: what is installed, without importing any of it."""

from __future__ import annotations

import argparse

from core import catalog
from core.technique import technique


@technique(paper="own work: entry points as the only registry")
def plugins(arguments: list[str]) -> int:
    """Lists the registered techniques of all installed packages.

    Example:
        python -m core plugins list --kind callbacks
    """
    parser = argparse.ArgumentParser(prog="python -m core plugins", description=plugins.__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="list techniques, their kind, package and purpose")
    listing.add_argument("--kind", choices=catalog.KINDS, help="only this kind")
    listing.add_argument("--package", help="only this distribution")
    listing.add_argument("--search", metavar="WORD", help="only names and summaries with this word")
    listing.add_argument("--markdown", action="store_true", help="as a Markdown table")
    options = parser.parse_args(arguments)
    rows = [
        (entry.kind, entry.name, entry.origin, entry.summary())
        for entry in catalog.entries()
        if options.kind in (None, entry.kind) and options.package in (None, entry.package)
    ]
    word = (options.search or "").lower()
    rows = [row for row in rows if word in f"{row[1]} {row[3]}".lower()]
    if options.markdown:
        for kind, name, _, summary in [("kind", "name", "", "what it does"), ("---", "---", "", "---"), *rows]:
            print(f"| {kind} | {name} | {summary} |")
    else:
        _print_table(("kind", "name", "package", "what it does"), rows)
    return 0


def _print_table(header: tuple[str, ...], rows: list[tuple[str, str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    for row in [header, *rows]:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]))
