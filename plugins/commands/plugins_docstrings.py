"""Reads what a technique says of itself: its docstring's sections, its arguments, its YAML snippet."""

from __future__ import annotations

import inspect
import re
from typing import Any

from core import catalog
from core.cli import POSITIONS
from core.config_files import dump_yaml, parse_yaml
from core.docstrings import documented as documented  # also read from here
from core.docstrings import sections
from core.errors import ConfigError

GIVEN = {"optimizers": 1, "schedules": 1}
"""Kind -> how many of the first arguments the run supplies: parameters, or the optimizer."""

LISTS = ("trainer.callbacks", "trainer.plugins", "trainer.logger")
"""The positions of a config that take several classes; there a class is known by its name, not by its index."""


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Returns the named arguments of a class's constructor; where it passes `**kwargs` on, its base's too."""
    found: dict[str, inspect.Parameter] = {}
    for kind in getattr(target, "__mro__", ()):
        if "__init__" not in vars(kind) or kind is object:
            continue
        try:
            own = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):  # written in C, without a signature
            break
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found.update({p.name: p for p in own if p.kind not in several and p.name not in found})
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own):
            break
    return found


def type_of(parameter: inspect.Parameter) -> str:
    """Returns a parameter's type as its author wrote it; empty if there is none."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def example_problem(entry: catalog.Entry, snippet: str) -> str | None:
    """Returns what is wrong with the snippet of a docstring's Example section, or None."""
    if not snippet:
        return "the docstring has no `Example:` section"
    if entry.kind == "commands":
        found = re.search(rf"(-m core|leyden) {re.escape(entry.name)}\b", snippet)
        return None if found else f"the example does not call `python -m core {entry.name}`"
    try:
        parse_yaml(snippet, "the example")
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None if re.search(rf"\b{entry.name}\b", snippet) else f"the example does not name {entry.name}"


def example_of(entry: catalog.Entry, target: Any) -> str:
    """Returns a snippet that parses: the docstring's, or one made from the signature."""
    snippet = sections(target.__doc__).get("Example", "")
    if example_problem(entry, snippet) is None:
        return snippet
    if entry.kind == "commands":
        return f"python -m core {entry.name} --help"
    needed = list(parameters(target).values())[GIVEN.get(entry.kind, 0) :]
    arguments = {p.name: f"<{type_of(p) or 'value'}>" for p in needed if p.default is p.empty}
    named: Any = {"class_path": entry.name} | ({"init_args": arguments} if arguments else {})
    position = next((key for key, kinds in POSITIONS.items() if entry.kind in kinds), "")
    if position in LISTS:
        position, named = f"{position}+", [named]
    for part in reversed(position.split(".") if position else []):
        named = {part: named}
    return dump_yaml(named).rstrip()
