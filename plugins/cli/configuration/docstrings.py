"""Reads Google docstrings: their sections, and the description of each argument. Imports nothing heavy.

docstring_parser 0.18 finds the same arguments in the docstrings of all our techniques, of Lightning's callbacks and of
torch's AdamW and SGD, as fast. But it changes the indentation of an `Example:`, which has to stay YAML (in 84 of the 90
docstrings that have one), and leaves the roles of reStructuredText in.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

SECTIONS = ("Args", "Attributes", "Example", "Examples", "Note", "Raises", "Returns", "Yields")


def sections(docstring: str | None) -> dict[str, str]:
    """Splits a Google docstring into its sections, without their indentation; "" holds the prose."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line.rstrip().endswith(":") and line.rstrip(": ") in SECTIONS:
            name = line.rstrip(": ")
            found[name] = []
            continue
        if line and not line.startswith(" "):  # prose, before the sections or after one
            name = ""
        found[name].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip("\n") for name, lines in found.items()}


def documented(section: str) -> dict[str, str]:
    """Returns name -> description of each item in an Args section."""
    items = re.findall(
        r"^\*{0,2}(\w+)(?: \([^)]*\))?:((?:.*\n?)(?:(?:[ ].*)?(?:\n|$))*)", section, re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in items}


def described(target: Any) -> dict[str, str]:
    """Returns argument -> description, from the docstrings of a class, its constructor and its bases."""
    found: dict[str, str] = {}
    for kind in getattr(target, "__mro__", (target,)):
        for owner in (kind, getattr(kind, "__dict__", {}).get("__init__")):
            found_here = documented(sections(getattr(owner, "__doc__", None)).get("Args", ""))
            found = {**{name: plain(text) for name, text in found_here.items()}, **found}
    return found


def summary(target: Any) -> str:
    """Returns the first sentence of the docstring, or of the constructor's; empty if there is none."""
    docstring = getattr(target, "__doc__", None) or getattr(vars(target).get("__init__"), "__doc__", None)
    paragraph = sections(docstring)[""].strip().partition("\n\n")[0]
    return first_sentence(plain(" ".join(paragraph.split())))


def first_sentence(text: str) -> str:
    """Returns the text up to the first full stop that ends a sentence."""
    found = re.match(r".*?(?<!e\.g)(?<!i\.e)(?<!etc)[.!?](?=\s+[^a-z\s]|$)", text)
    return found[0] if found else text


def plain(text: str) -> str:
    """Returns text without reStructuredText's roles and double backquotes: `Trainer` for :class:`~x.Trainer`."""
    text = re.sub(r":[\w:]+:`~([^`<>]*\.)?([^`<>]*)`", r"`\2`", text)
    return re.sub(r":[\w:]+:(?=`)", "", text).replace("``", "`")
