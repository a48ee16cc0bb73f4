"""What classes and commands take, read from their source: nothing is imported, so that a TAB costs 0.2 s."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from core import catalog
from plugins.cli.configuration.class_names import KIND_OF
from plugins.cli.configuration.docstrings import documented, first_sentence, plain, sections

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
    texts: dict[str, str] = {}
    for home, kind in lineage(module, name):
        functions = [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == method]
        nodes: list[ast.ClassDef | ast.FunctionDef] = [kind, *functions]
        for node in nodes:
            text = sections(ast.get_docstring(node)).get("Args", "")
            texts = {
                **{key: first_sentence(plain(value)) for key, value in documented(text).items()},
                **texts,
            }
        for function in functions:
            given = function.args
            for each in [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]:
                found.setdefault(each.arg, _understand(each.annotation, home))
        if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
            fields = [part for part in kind.body if isinstance(part, ast.AnnAssign)]
            found |= {ast.unparse(part.target): _understand(part.annotation, home) for part in fields}
        if functions and not functions[0].args.kwarg:
            break
    for key, argument in found.items():
        argument.text = texts.get(key, "")
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
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


# -- commands that use argparse -------------------------------------------------------------------


@dataclass
class Word:
    """An option, a positional argument or a subcommand of a command, as its source declares it.

    Attributes:
        parent: The subcommand that it belongs to; empty for the command itself.
        name: "--option", the name of a positional argument, or the subcommand.
        kind: "option", "flag" (an option without a value), "positional" or "subcommand".
        choices: The values that it may take.
        text: Its `help`, with the default filled in.
        metavar: The name of its value in help.
    """

    parent: str
    name: str
    kind: str
    choices: list[str]
    text: str
    metavar: str = ""


@cache
def command_words(module: str) -> list[Word]:
    """Returns what the calls of `add_argument` and `add_parser` in a module declare."""
    calls = [
        node
        for home in [module, *_options_from(module)]
        for node in ast.walk(_module(home))
        if isinstance(node, ast.Call)
    ]
    parsers = {
        ast.unparse(node.targets[0]): _text(node.value.args[0])
        for node in ast.walk(_module(module))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _called(node.value) == "add_parser"
    }
    return [word for call in calls if (word := _declared(call, parsers, module))]


def _options_from(module: str) -> list[str]:
    """Returns the modules from which a command imports functions that add options: `add_..._options`."""
    imports = [node for node in _module(module).body if isinstance(node, ast.ImportFrom) and node.module]
    return [
        node.module or ""
        for node in imports
        if any(re.fullmatch(r"add_\w*options", alias.name) for alias in node.names)
    ]


def _declared(call: ast.Call, parsers: Mapping[str, str], module: str) -> Word | None:
    """Returns what a call of `add_argument` or `add_parser` declares; None for other calls."""
    called, name = _called(call), _text(call.args[0] if call.args else None)
    if called not in ("add_argument", "add_parser") or not name or not isinstance(call.func, ast.Attribute):
        return None
    given = {word.arg: word.value for word in call.keywords if word.arg}
    parent = parsers.get(ast.unparse(call.func.value), "")
    if called == "add_parser":
        kind = "subcommand"
    elif not name.startswith("-"):
        kind = "positional"
    else:
        is_flag = _text(given.get("action")) in ("store_true", "store_false", "version")
        kind = "flag" if is_flag else "option"
    choices, metavar = _choices(given.get("choices"), module), _text(given.get("metavar"))
    return Word(parent, name, kind, choices, _help(given, module), metavar)


def _help(keywords: Mapping[str, ast.AST], module: str) -> str:
    """Returns what argparse makes of a `help`: the default in its place, a sign of percent for two."""
    node = keywords.get("help")
    if isinstance(node, ast.Name) and (found := find(module, node.id)):
        node = found[1]
    try:
        value = ast.literal_eval(keywords.get("default", ast.Constant(None)))
        default = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    except ValueError:  # worked out when the command runs
        default = "..."
    filled = {"%%": "%", "%(default)s": default}
    return re.sub(r"%%|%\(default\)s", lambda found: filled[found[0]], _text(node))


def _called(node: ast.AST | None) -> str:
    return _last(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _choices(node: ast.AST | None, module: str) -> list[str]:
    if isinstance(node, ast.Name) and (found := find(module, node.id)):
        node = found[1]
    elements = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else []
    return [_text(each) for each in elements if _text(each)]
