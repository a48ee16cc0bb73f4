"""Reads what a technique says of itself: its docstring's sections, its arguments, its YAML snippet."""

from __future__ import annotations

import inspect
from typing import Any

from core import catalog
from core.config_files import dump_yaml
from core.docstrings import documented as documented  # these are also read from here
from core.docstrings import sections
from core.testing.case import LISTS as LISTS
from core.testing.case import at_position
from core.testing.declared import example_problem

GIVEN = {"optimizers": 1, "schedules": 1}
"""Kind -> how many of the first arguments the run supplies: parameters, or the optimizer."""


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
    return dump_yaml(at_position(entry, named)).rstrip()
