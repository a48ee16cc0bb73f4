"""Text that comes with Python: its language reference and the docstrings of its standard library."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

NAME = "python-docs"

_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "_bundled",
    "__hello__",
    "__phello__",
    "__pycache__",
}

_VERSION = "82c7141ad51db3b550b63478b1ae1bdb615336b3c2b92afeef65881ab4c0aa23"
"""Part of the data's cache key: change it with any change of this file that gives other text."""


def fingerprint() -> dict[str, Any]:
    """Returns the versions of Python and of this module: together they decide the text."""
    return {"source": NAME, "python": sys.version, "collector": _VERSION}


@cache
def python_documents() -> tuple[str, ...]:
    """Returns the documents, about 2 MB: the topics of `help()`, then one document a module.

    A module's document reads like a reference page: its docstring, then the name, arguments and
    docstring of each class and function. Modules are parsed, never imported. Repeated docstrings are left
    out.
    """
    pages = _topics()
    seen: set[str] = set()
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED)  # os.walk enters these, in this order
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix == ".py" and path.stem not in _SKIPPED:
                module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                pages.append(_page(module, path, seen))
    pages = [page.encode("utf-8", "replace").decode() for page in pages]  # escapes may spell lone surrogates
    return tuple(dict.fromkeys(page for page in pages if page))


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return []
    return [topics[name] for name in sorted(topics)]


def _page(module: str, path: Path, seen: set[str]) -> str:
    """Returns a module's document; empty if it has no new docstring or cannot be parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return ""
    entries = []
    for heading, node in [("", tree), *_definitions(tree, "")]:
        text = (ast.get_docstring(node) or "").strip()
        if text and text not in seen:
            seen.add(text)
            entries.append(f"{heading}\n\n{textwrap.indent(text, '   ')}" if heading else text)
    if not entries:
        return ""
    return "\n\n".join([f"{module}\n{'*' * len(module)}", *entries]) + "\n"


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the classes and functions of a module or class, in order, each with its heading."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            yield f"class {prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in (*child.args.posonlyargs, *child.args.args)]
            yield f"{prefix}{child.name}({', '.join(names)})", child
        elif isinstance(child, ast.If | ast.Try):  # definitions that depend on the platform
            yield from _definitions(child, prefix)
            yield from _definitions(ast.Module(child.orelse, []), prefix)
