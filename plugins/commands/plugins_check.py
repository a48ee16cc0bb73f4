"""`plugins check`: imports every technique of a package and says what is wrong with it.

What it runs is the part of the conformance kit (`conformance`) that trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions

from packaging.utils import canonicalize_name

from conformance.case import Case, entries_of
from conformance.proof import STATIC, proofs
from core import catalog
from core.errors import ConfigError, nearest
from plugins.commands.plugins_terminal import print_table


def check(package: str | None) -> int:
    """Prints a row for each technique of a package, or of all, and what is wrong; returns 1 if anything is.

    Raises:
        ConfigError: If no such package registers anything.
    """
    strays = sorted(set(_strays(package)))
    try:
        chosen = list(catalog.entries()) if package is None else entries_of(package)
    except ConfigError:
        if not strays:
            raise
        chosen = []
    rows = [("kind", "name", "package", "result")]
    for entry in chosen:
        problems = list(_problems(entry)) or ["ok"]
        rows.append((entry.kind, entry.name, entry.origin, problems[0]))
        rows += [("", "", "", problem) for problem in problems[1:]]
    print_table(rows + strays)
    broken = sum(row[0] != "" and row[3] != "ok" for row in rows[1:]) + len(strays)
    print(f"\n{len(chosen) + len(strays)} checked, {broken} broken.")
    return 1 if broken else 0


def _problems(entry: catalog.Entry) -> Iterator[str]:
    """Yields what each proof reports; a technique that cannot be imported is not checked further."""
    case = Case(entry)
    for proof in proofs(entry.kind, STATIC):
        try:
            proof.check(case)
        except AssertionError as error:
            yield from str(error).splitlines()
        except ConfigError as error:
            yield str(error).splitlines()[0]
        else:
            continue
        if proof.name == "imports":
            return


def _strays(package: str | None) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each entry in a group that looks like one of ours but is none."""
    groups = {f"leyden.{kind}" for kind in catalog.KINDS}
    for distribution in distributions():
        name = str(distribution.metadata["Name"])
        if package is not None and canonicalize_name(name) != canonicalize_name(package):
            continue
        for point in distribution.entry_points:
            if point.group.startswith("leyden.") and point.group not in groups:
                kind, said = point.group.removeprefix("leyden."), f"there is no group {point.group}."
                yield kind, point.name, f"{name} {distribution.version}", said + nearest(point.group, groups)
