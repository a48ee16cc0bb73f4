"""What a class or function takes: its arguments with types and defaults, and which types name a class."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from functools import cache
from typing import Any, NamedTuple

from plugins.cli.configuration.class_names import Bases

REQUIRED = inspect.Parameter.empty
"""The default of an argument that has none."""

_UNTYPED = (inspect.Parameter.empty, Any)
_UNIONS = (typing.Union, types.UnionType)
_PLAIN = ("builtins", "collections", "datetime", "os", "pathlib", "typing")


class Argument(NamedTuple):
    """One argument of a signature: its type, `Any` where nothing is known, and its default or `REQUIRED`.

    `written` is the type as its author wrote it; empty if there is none.
    """

    hint: Any
    default: Any
    written: str = ""


def parameters(target: Any) -> tuple[dict[str, Argument], bool]:
    """Returns the arguments of a class or function, and whether it may take others.

    Arguments that a class passes on to its bases are among them; what it passes to something else is not.
    """
    functions = [target]
    if isinstance(target, type):
        functions = [vars(kind)["__init__"] for kind in target.__mro__[:-1] if "__init__" in vars(kind)]
    found: dict[str, Argument] = {}
    for function in functions:
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # written in C, without a signature
            continue
        hints, rest = _hints(function), ""
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = name
            elif name != "self" and parameter.kind is not parameter.VAR_POSITIONAL:
                own = Argument(hints.get(name, Any), parameter.default, _written(parameter.annotation))
                found.setdefault(name, own)
        if not rest or _keeps(function, rest):
            return found, bool(rest)
    return found, bool(functions)


def hint_of(target: Any, name: str) -> Any:
    """Returns the type of one argument; `Any` where nothing is known.

    jsonargparse knows those that a class passes on to something else, and those of imports for type checkers.
    """
    own = parameters(target)[0].get(name)
    if own and (own.hint is not Any or own.written in ("", "Any", "typing.Any")):
        return own.hint
    return _resolved(target).get(name, Any)


@cache
def _resolved(target: Any) -> dict[str, Any]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    add = parser.add_class_arguments if isinstance(target, type) else parser.add_function_arguments
    try:
        add(target, fail_untyped=False)
    except Exception:  # any error: nothing is known then
        return {}
    return {action.dest: getattr(action, "_typehint", Any) for action in parser._actions}


def _keeps(constructor: Any, rest: str) -> bool:
    """Returns whether `**rest` goes elsewhere than to the constructor of a base."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(constructor)))))
    except (OSError, TypeError, SyntaxError):
        return False
    used = sum(isinstance(node, ast.Name) and node.id == rest for node in nodes)
    calls = [
        node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__init__")
    ]
    passed = sum(
        word.arg is None and ast.unparse(word.value) == rest for call in calls for word in call.keywords
    )
    return used > passed


def _written(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (TypeError, NameError):  # a type that is imported for type checkers only
        return {}


def class_types(hint: Any) -> Bases:
    """Returns the classes that a value of this type names: of `Network`, `list[Callback]`, `Callable[[], X]`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return (hint,) if isinstance(hint, type) and hint.__module__.partition(".")[0] not in _PLAIN else ()
    if origin is typing.Literal:
        return ()
    parts = inner[-1:] if is_callable(hint) else inner
    return tuple(dict.fromkeys(found for part in parts for found in class_types(part)))


def is_callable(hint: Any) -> bool:
    """Returns whether a type is `Callable`, with or without its arguments."""
    return getattr(typing.get_origin(hint) or hint, "__name__", "") == "Callable"


def names_callables(hint: Any) -> bool:
    """Returns whether a text is taken as the path of something to call, or of a class."""
    origin = typing.get_origin(hint)
    inside = () if origin is typing.Literal else typing.get_args(hint)
    return is_callable(hint) or type in (hint, origin) or any(names_callables(part) for part in inside)


def takes_text(hint: Any) -> bool:
    """Returns whether a text is among the values of a type as it is."""
    return hint is str or (typing.get_origin(hint) in _UNIONS and any(map(takes_text, typing.get_args(hint))))


def takes_list(hint: Any) -> bool:
    """Returns whether a list is among the types."""
    origin = typing.get_origin(hint)
    if getattr(origin, "__name__", "") in ("list", "Iterable", "Sequence"):
        return True
    inside = is_callable(hint) or getattr(origin, "__name__", "") in ("dict", "Mapping", "tuple")
    return not inside and any(takes_list(part) for part in typing.get_args(hint))


def literals(hint: Any) -> list[Any]:
    """Returns the values that a Literal, or a union with one, allows."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for part in typing.get_args(hint) for value in literals(part)]


def accepts(hint: Any, value: Any) -> bool:
    """Returns whether jsonargparse takes a plain value for this type."""
    if hint in _UNTYPED:
        return True
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
        parser.parse_object({"value": value})
    except Exception:  # argparse, type and value errors alike: the answer is no
        return False
    return True


def takes_null(hint: Any) -> bool:
    """Returns whether null is among the values of a type; a type that is not understood takes it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(takes_null(part) for part in inner)
    if origin is typing.Literal:
        return None in inner
    return hint in (*_UNTYPED, object, None, type(None)) or not (origin or isinstance(hint, type))


def given(hint: Any) -> int:
    """Returns how many arguments the caller gives to a class: 1 for `Callable[[Optimizer], LRScheduler]`."""
    inner = typing.get_args(hint)
    if is_callable(hint):
        return len(inner[0]) if inner and isinstance(inner[0], list) else 0
    return max((given(part) for part in inner), default=0) if typing.get_origin(hint) in _UNIONS else 0


def understood(target: Any, given: int = 0) -> set[str] | None:
    """Returns the arguments that jsonargparse takes for a class, those behind the first `given`.

    It follows `**kwargs` to where they are used, which :func:`parameters` does not; None if it cannot.
    """
    from jsonargparse import ArgumentParser

    skip: set[str | int] | None = {given} if given else None
    try:
        return set(ArgumentParser().add_class_arguments(target, fail_untyped=False, skip=skip))
    except Exception:  # any error: not a mistake of the user
        return None


def describe(hint: Any) -> str:
    """Returns a type as people write it: int | null, list[Callback], Network for what builds a Network."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return "null"
    if origin in _UNIONS:
        return " | ".join(dict.fromkeys(describe(part) for part in inner))
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if is_callable(hint):
        return describe(inner[-1]) if class_types(hint) else "a function"
    if origin is not None:
        name = "list" if takes_list(hint) else getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join('...' if part is ... else describe(part) for part in inner)}]"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def sections() -> dict[str, Any]:
    """Returns section of a config -> the class whose arguments, or whose subclass, it holds."""
    from lightning.pytorch import LightningDataModule, Trainer

    from core.language_module import LanguageModule

    return {"trainer": Trainer, "model": LanguageModule, "data": LightningDataModule}
