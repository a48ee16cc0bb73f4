"""Questions about Python's standard library, answered by the first sentence of the documentation: real text, always there."""

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

LEFT_OUT = {"antigravity", "this", "idlelib", "turtledemo", "tkinter", "lib2to3", "test", "turtle"}
"""Modules that print, open windows, or are no part of the library."""

LENGTHS = range(20, 161)
"""Characters of an answer."""


def documented(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the qualified name of each function, class and method that a module defines."""
    for name, found in sorted(vars(module).items()):
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isroutine(found) or inspect.isclass(found):
            yield f"{module.__name__}.{name}", found
        if inspect.isclass(found):
            for part, member in sorted(vars(found).items()):
                if not part.startswith("_") and callable(member):
                    yield f"{module.__name__}.{name}.{part}", member


def docstring_chats() -> list[dict[str, str]]:
    """Returns records with `prompt`, `completion` and `module`, each answer once."""
    answers: dict[str, dict[str, str]] = {}
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = importlib.import_module(name)
        except (ImportError, RuntimeError):  # of another operating system, or not built
            continue
        for qualified, found in documented(module):
            text = (inspect.getdoc(found) or "") if getattr(found, "__doc__", None) else ""
            answer = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
            if len(answer) in LENGTHS:
                record = {"prompt": f"What does `{qualified}` do?", "completion": answer, "module": name}
                answers.setdefault(answer, record)
    return list(answers.values())


def write_chats(path: Any) -> int:
    """Writes the records as JSON lines; returns their number."""
    records = docstring_chats()
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return len(records)
