"""What classes and commands take, read from their source: nothing is imported, so that a TAB costs 0.2 s."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from core import catalog
from core.configuration.class_names import KIND_OF
from core.configuration.docstrings import documented, first_sentence, plain, sections

Definition = tuple[str, ast.AST]
"""The module that defines a name, and the class, function or value that it defines."""

_DEPTH = 8
"""Imports, bases and aliases that are followed one after another."""


@dataclass
class Argument:
    """One argument of a class.

    Attributes:
        words: The values that it may take, where its type lists them.
        bases: Names of the base classes of what it takes.
        several: Whether it takes a list.
        given: How many of the class's first arguments the run supplies.
        paths: Whether it takes a path.
        text: One sentence from the docstring.
    """

    words: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    several: bool = False
    given: int = 0
    paths: bool = False
    text: str = ""


@cache
def _module(name: str) -> ast.Module:
    path = catalog.source_file(name)
    try:
        return ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module([], [])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def find(module: str, name: str, depth: int = _DEPTH) -> Definition | None:
    """Returns what a name in a module means, followed through imports; None where it cannot be found."""
    for node in _statements(_module(module).body) if depth else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == name for t in node.targets):
            return module, node.value
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    foreign = _package(node.module) in sys.stdlib_module_names
                    return None if foreign else find(node.module, alias.name, depth - 1)
    return None


def exported(module: str) -> list[str]:
    """Returns the class names in a module's `__all__`."""
    found = find(module, "__all__")
    words = ast.literal_eval(found[1]) if found and isinstance(found[1], ast.List) else []
    return [word for word in words if word[:1].isupper()]


def lineage(module: str, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields a class and its bases, nearest first, as far as their source is there."""
    found = find(module, name)
    if found and isinstance(found[1], ast.ClassDef) and depth:
        yield found[0], found[1]
        for base in found[1].bases:
            yield from lineage(found[0], _last(base), depth - 1)


def derives(module: str, name: str, bases: Sequence[str]) -> bool:
    """Returns whether a class derives from one that has one of these names."""
    return any(_last(base) in bases for _, kind in lineage(module, name) for base in kind.bases)


@cache
def arguments(module: str, name: str, method: str = "__init__") -> dict[str, Argument]:
    """Returns the arguments of a class, those that it passes on to its bases included."""
    found: dict[str, Argument] = {}
    told: dict[str, str] = {}
    for home, kind in lineage(module, name):
        functions = [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == method]
        for node in (kind, *functions):
            text = sections(ast.get_docstring(node)).get("Args", "")
            told = {**{key: first_sentence(plain(value)) for key, value in documented(text).items()}, **told}
        for function in functions:
            given = function.args
            for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]:
                found.setdefault(argument.arg, _understand(argument.annotation, home))
        if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
            fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
            found |= {ast.unparse(each.target): _understand(each.annotation, home) for each in fields}
        if functions and not functions[0].args.kwarg:
            break
    for key, argument in found.items():
        argument.text = told.get(key, "")
    return found


def _understand(annotation: ast.AST | None, module: str) -> Argument:
    result = Argument()
    if annotation is not None:
        _collect(annotation, module, result, _DEPTH)
    return result


def _collect(node: ast.AST, module: str, result: Argument, depth: int) -> None:
    """Adds what a type says: its literals, its classes, whether it takes a list or a path."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and depth:
        try:
            _collect(ast.parse(node.value, mode="eval").body, module, result, depth - 1)
        except SyntaxError:
            return
    elif isinstance(node, ast.Subscript) and _last(node.value) == "Literal":
        result.words += [str(each.value) for each in ast.walk(node.slice) if isinstance(each, ast.Constant)]
    elif isinstance(node, ast.Subscript) and _last(node.value) == "Callable":
        taken, returned = node.slice.elts if isinstance(node.slice, ast.Tuple) else (node.slice, node.slice)
        result.given = len(getattr(taken, "elts", ()))
        _collect(returned, module, result, depth)
    elif isinstance(node, ast.Name | ast.Attribute):
        _name(_last(node), module, result, depth)
    else:
        for child in ast.iter_child_nodes(node):
            _collect(child, module, result, depth)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _name(name: str, module: str, result: Argument, depth: int) -> None:
    if name == "bool":
        result.words += ["true", "false"]
    elif name in KIND_OF and name not in result.bases:
        result.bases.append(name)
    elif name in ("list", "List", "Iterable", "Sequence"):
        result.several = True
    elif "Path" in name or name == "_PATH":
        result.paths = True
    elif depth and name.startswith("_"):  # an alias; other names are classes, costly to look up
        home, alias = find(module, name) or (module, ast.Pass())
        _collect(alias, home, result, depth - 1)


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


# -- commands that use argparse -------------------------------------------------------------------


@dataclass
class Word:
    """An option, a positional argument or a subcommand of a command, as its source declares it.

    Attributes:
        parent: The subcommand that it belongs to; empty for the command itself.
        name: "--option", the name of a positional argument, or the subcommand.
        kind: "option", "flag" (an option without a value), "positional" or "subcommand".
        choices: The values that it may take.
        text: Its `help`.
    """

    parent: str
    name: str
    kind: str
    choices: list[str]
    text: str


@cache
def command_words(module: str) -> list[Word]:
    """Returns what the calls of `add_argument` and `add_parser` in a module declare."""
    parsers: dict[str, str] = {}
    words = []
    nodes = list(ast.walk(_module(module)))
    for node in nodes:
        if isinstance(node, ast.Assign) and _called(node.value) == "add_parser":
            parsers[ast.unparse(node.targets[0])] = _text(node.value.args[0])  # type: ignore[attr-defined]
    for node in nodes:
        called = _called(node)
        if called not in ("add_argument", "add_parser") or not (
            name := _text(node.args[0] if node.args else None)
        ):  # type: ignore[attr-defined]
            continue
        told: dict[str, Any] = {word.arg: word.value for word in node.keywords}  # type: ignore[attr-defined]
        parent = parsers.get(ast.unparse(node.func.value), "")  # type: ignore[attr-defined]
        if called == "add_parser":
            kind = "subcommand"
        elif name.startswith("-"):
            kind = (
                "flag" if _text(told.get("action")) in ("store_true", "store_false", "version") else "option"
            )
        else:
            kind = "positional"
        words.append(Word(parent, name, kind, _choices(told.get("choices"), module), _text(told.get("help"))))
    return words


def _called(node: ast.AST | None) -> str:
    return _last(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _choices(node: ast.AST | None, module: str) -> list[str]:
    if isinstance(node, ast.Name) and (found := find(module, node.id)):
        node = found[1]
    elements = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else []
    return [_text(each) for each in elements if _text(each)]
