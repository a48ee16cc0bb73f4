"""`plugins show`: all about one technique, from its declaration, its signature and its docstring."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from conformance.case import at_position
from conformance.declared import example_problem
from core import catalog
from core.technique import Declaration, Package, declaration_of
from plugins.cli.configuration.docstrings import described, sections
from plugins.cli.configuration.signatures import REQUIRED, parameters
from plugins.cli.configuration.yaml_texts import dump_yaml
from plugins.commands.completion_sources import Word, command_words

GIVEN = {"optimizers": 1, "schedules": 1}
"""Kind -> how many of the first arguments the run supplies: parameters, or the optimizer."""


def show(name: str) -> int:
    """Prints what a technique does, takes and needs, a snippet that parses, and where it lives.

    Raises:
        ConfigError: If there is no such technique, or it cannot be imported.
    """
    entry = catalog.find(name)
    target = entry.load()
    docstring = sections(target.__doc__)
    blocks = [
        ("", [f"{entry.name}  ({entry.kind}, from {entry.origin})", "", docstring[""]]),
        ("Options", list(_options(entry))),
        ("Arguments", list(_arguments(entry, target, described(target)))),
        ("Attributes", docstring.get("Attributes", "").splitlines()),
        ("Raises", docstring.get("Raises", "").splitlines()),
        ("Declared", list(_declared(declaration_of(target)))),
        ("Example", _example(entry, target).splitlines()),
        ("Where", list(_where(entry, target))),
    ]
    for title, lines in blocks:
        if title and lines:
            print(f"\n{title}:\n" + textwrap.indent("\n".join(lines), "  "))
        elif lines:
            print("\n".join(lines).rstrip())
    return 0


def _options(entry: catalog.Entry) -> Iterator[str]:
    """Yields what a command takes, as far as its source declares it, those of a subcommand below it."""
    if entry.kind != "commands":
        return
    words = command_words(entry.module)
    shown = sorted(words, key=lambda word: (word.kind == "subcommand", word.kind != "positional"))
    for word in shown:
        if word.parent:
            continue
        yield from _option(word, "")
        if word.kind == "subcommand":
            for below in shown:
                yield from _option(below, "  ") if below.parent == word.name else ()
    call = f"python -m core {entry.name} --help"
    yield f"`{call}` shows them all." if not words else f"See also `{call}`."


def _option(word: Word, indent: str) -> Iterator[str]:
    value = f"{{{','.join(word.choices)}}}" if word.choices else word.metavar
    if word.kind == "option":
        name = f"{word.name} {value or word.name.lstrip('-').replace('-', '_').upper()}"
    else:
        name = value if word.kind == "positional" and value else word.name
    yield f"{indent}{name}"
    yield from textwrap.wrap(
        word.text, 104, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    "
    )


def _arguments(entry: catalog.Entry, target: Any, texts: Mapping[str, str]) -> Iterator[str]:
    if entry.kind == "commands":  # it takes the words after its name
        return
    for index, (name, argument) in enumerate(parameters(target)[0].items()):
        kind = f": {argument.written}" if argument.written else ""
        if index < GIVEN.get(entry.kind, 0):
            default = "  (given by the run)"
        elif argument.default is REQUIRED:
            default = "  (required)"
        else:
            default = f" = {argument.default!r}"
        yield f"{name}{kind}{default}"
        if name in texts:
            yield from textwrap.wrap(texts[name], 104, initial_indent="    ", subsequent_indent="    ")


def _declared(declaration: Declaration | None) -> Iterator[str]:
    if declaration is None:
        yield "nothing: it lacks @technique(...)"
        return
    for field in fields(declaration):
        value = getattr(declaration, field.name)
        if isinstance(value, Mapping):
            lines = [f"{name}: {reason}" for name, reason in value.items()]
        elif isinstance(value, tuple):
            lines = [_need(item) if field.name == "needs" else str(item) for item in value]
        else:
            lines = [str(value)] if value else []
        for index, line in enumerate(lines):
            yield f"{field.name if index == 0 else '':<10} {line}"


def _need(need: Any) -> str:
    # of the others a run decides: what its accelerator is, how many processes it has, what else is selected
    return f"{need} ({need.missing() or 'present'})" if isinstance(need, Package) else str(need)


def _where(entry: catalog.Entry, target: Any) -> Iterator[str]:
    yield f"class      {entry.class_path}" if inspect.isclass(target) else f"function   {entry.class_path}"
    try:
        yield f"file       {inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        yield "file       (its source is not there)"
    yield f"package    {entry.origin}"


def _example(entry: catalog.Entry, target: Any) -> str:
    """Returns a snippet that parses: the docstring's, or one made from the signature."""
    snippet = sections(target.__doc__).get("Example", "")
    if example_problem(entry, snippet) is None:
        return snippet
    if entry.kind == "commands":
        return f"python -m core {entry.name} --help"
    needed = list(parameters(target)[0].items())[GIVEN.get(entry.kind, 0) :]
    arguments = {name: f"<{arg.written or 'value'}>" for name, arg in needed if arg.default is REQUIRED}
    named: Any = {"class_path": entry.name} | ({"init_args": arguments} if arguments else {})
    return dump_yaml(at_position(entry, named)).rstrip()
