"""The command `plugins`: what is installed, what a technique is, a new one, and whether they are sound."""

from __future__ import annotations

import argparse
import re
from typing import Any

from core import catalog
from core.errors import ConfigError, nearest
from core.technique import technique
from plugins.cli.configuration.command_parser import Parser
from plugins.commands.plugins_terminal import print_table


@technique(paper="own work: entry points as the only registry")
def plugins(arguments: list[str]) -> int:
    """Lists, shows, scaffolds and checks techniques, those of all installed packages.

    Example:
        python -m core plugins list --kind callbacks
        python -m core plugins show WarmupCosine
        python -m core plugins new SpikeGuard --kind callbacks
        python -m core plugins new ShortTexts --kind data --contract Transform --into leyden-spike-guard
        python -m core plugins check leyden-spike-guard
    """
    options = _options(arguments)
    if options.action == "list":
        return _list(options)
    # not at the top: `list`, `--help` and a wrong word need none of it
    if options.action == "show":
        from plugins.commands.plugins_show import show

        return show(options.name)
    if options.action == "new":
        from plugins.commands.plugins_new import new

        return new(options.name, options.kind, options.output, options.into, options.contract)
    from plugins.commands.plugins_check import check

    return check(options.package)


def _kind(word: str) -> str:
    """Returns the kind of an option; a former name is taken with a warning."""
    return catalog.new_kind(word, f"--kind {word}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m core plugins", description=plugins.__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    kind: dict[str, Any] = {"type": _kind, "choices": catalog.KINDS, "metavar": "KIND"}
    listing = actions.add_parser("list", help="list techniques, their kind, package and purpose")
    listing.add_argument("--kind", **kind, help="only this kind: " + ", ".join(catalog.KINDS))
    listing.add_argument("--package", help="only this distribution")
    listing.add_argument("--search", metavar="WORD", help="only names and summaries with this word")
    listing.add_argument("--markdown", action="store_true", help="as a Markdown table")
    show = actions.add_parser("show", help="all about one technique, with YAML to paste")
    show.add_argument("name", metavar="NAME", help="short name or full path")
    new = actions.add_parser("new", help="write a package with a technique that works, to start from")
    new.add_argument(
        "name", metavar="NAME", help="a class name like SpikeGuard; for a command a word like count-tokens"
    )
    new.add_argument("--kind", **kind, required=True, help="what it is: callbacks, networks, ...")
    new.add_argument("--output", metavar="DIR", help="folder of the project; default ./leyden-NAME")
    new.add_argument("--into", metavar="DIR", help="add it to the package in this folder instead")
    new.add_argument("--contract", help="of the kind data: DocumentSource (the default) or Transform")
    check = actions.add_parser("check", help="import every technique and say what is wrong with it")
    check.add_argument("package", metavar="PACKAGE", nargs="?", help="only this distribution")
    return parser.parse_args(arguments)


def _summary(entry: catalog.Entry) -> str:
    """Returns the first line of a docstring; parsing all of 200 files takes a second, so it is looked for first."""
    path = catalog.source_file(entry.module)
    begin = rf'^(?:class|def) {re.escape(entry.attribute)}\b[^\n]*:\n +r?"""([^"\\\n]+)(?:\n|""")'
    try:
        found = path and re.search(begin, path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1].strip() if found else entry.summary()


def _list(options: argparse.Namespace) -> int:
    packages = {entry.package for entry in catalog.entries()}
    if options.package is not None and options.package not in packages:
        raise ConfigError(
            f"No installed package named {options.package!r} registers a technique."
            f"{nearest(options.package, packages)}\nThese do: {', '.join(sorted(packages))}."
        )
    rows = [
        (entry.kind, entry.name, entry.origin, _summary(entry))
        for entry in catalog.entries()
        if options.kind in (None, entry.kind) and options.package in (None, entry.package)
    ]
    word = (options.search or "").lower()
    rows = [row for row in rows if word in f"{row[1]} {row[3]}".lower()]
    if options.markdown:
        for kind, name, _, summary in [
            ("kind", "name", "", "what it does"),
            ("---", "---", "", "---"),
            *rows,
        ]:
            print(f"| {kind} | {name} | {summary} |")
    else:
        print_table([("kind", "name", "package", "what it does"), *rows])
    return 0
