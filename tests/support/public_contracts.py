"""The public contracts that CONTRIBUTING.md lists, and what a file takes from our modules."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.parsed import nodes

HOUSE = Path(__file__).resolve().parents[2]
PAGE = (HOUSE / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title):
    """Returns the text below a heading of the second level."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


@cache
def listed_names():
    """Returns module -> names of the table of public contracts."""
    rows = re.findall(
        r"^\| `((?:core|toolkit|conformance)[.\w]*)` \| ([^|]*) \|", section("Public contracts"), re.MULTILINE
    )
    found = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    assert len(found) > 5
    assert all(found.values())
    return found


@cache
def is_module(name):
    """Returns whether a name of ours is a module."""
    path = HOUSE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def taken(path, packages):
    """Yields (line, module, name) for each name that a file takes from modules of these packages, wherever that is.

    Of a module that is imported as such, the names are those that the file reads of it; "*" if there is none.
    """
    modules = {}  # local name -> (line, module)
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in packages:
                    yield node.lineno, alias.name, "*"  # not the way in which we import
        elif str(node.module).partition(".")[0] in packages:
            for alias in node.names:
                if is_module(module := f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = node.lineno, module
                else:
                    yield node.lineno, node.module, alias.name
    for local, (line, module) in modules.items():
        names = {
            node.attr
            for node in nodes(path, ast.Attribute)
            if isinstance(node.value, ast.Name) and node.value.id == local
        }
        yield from ((line, module, name) for name in sorted(names) or ["*"])


def not_public(path, packages=("core", "toolkit", "conformance")):
    """Returns "line: module.name" of what a file takes from us that the table does not list."""
    listed = listed_names()
    return [
        f"{line}: {module}.{name}"
        for line, module, name in taken(path, packages)
        if name not in listed.get(module, ())
        and (module, name) not in (("core", "API_VERSION"), ("core", "__version__"))
    ]
