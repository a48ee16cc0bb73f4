"""`--print_config` with a comment above each option: one sentence from the docstring of what it belongs to.

`--print_config=plain` prints without comments; jsonargparse's flags `skip_default` and `skip_unset` work as ever. Its
flag `comments` (4.53) is not used: it needs ruamel.yaml, which is not among our packages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

from core.errors import ConfigError, nearest
from plugins.cli.configuration.docstrings import described, first_sentence, summary
from plugins.cli.configuration.signatures import sections
from plugins.cli.configuration.trust import refusal
from plugins.cli.configuration.yaml_texts import Keys, parse_yaml

WIDTH = 110
_OPTION = "--print_config"
_FLAGS = {"plain", "skip_default", "skip_unset"}
_OTHERS = {
    "seed_everything": "Seeds every generator before anything is built; true: a seed drawn at random.",
    "weights_only": "Whether the checkpoint may hold nothing but tensors and plain values.",
}


@contextmanager
def annotating(arguments: list[str]) -> Iterator[list[str]]:
    """Yields the arguments for jsonargparse; comments what it prints if they ask for the configuration.

    Raises:
        ConfigError: If there is no such flag of `--print_config`.
    """
    asked = [word for word in arguments if word.partition("=")[0] == _OPTION]
    flags = [flag for word in asked for flag in word.partition("=")[2].split(",") if flag]
    if unknown := sorted({*flags} - _FLAGS):
        hint = nearest(unknown[0], _FLAGS) or f"\nThere are {', '.join(sorted(_FLAGS))}."
        raise ConfigError(f"{_OPTION} has no flag {unknown[0]!r}.{hint}")
    if "plain" in flags:
        rest = ",".join(flag for flag in flags if flag != "plain")
        yield [*(word for word in arguments if word not in asked), f"{_OPTION}={rest}"]
    elif asked:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                yield arguments
        finally:
            print(annotated(printed.getvalue()), end="")
    else:
        yield arguments


def annotated(text: str) -> str:
    """Returns a printed configuration with comments; it reads back as the same values."""
    values, positions = parse_yaml(text, "the printed configuration")
    comments = {int(positions[path].rpartition(":")[2]): comment for path, comment in _comments(values)}
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if comment := comments.get(number):
            indent = line[: len(line) - len(line.lstrip())] + "# "
            lines += textwrap.wrap(comment, WIDTH, initial_indent=indent, subsequent_indent=indent)
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _comments(values: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Yields (path of keys, comment) for each option and class that has a docstring."""
    targets = sections()
    descriptions = described(targets["trainer"].fit) | _OTHERS
    for name, value in values.items():
        if name in targets and "class_path" not in (value or {}):
            yield (name,), summary(targets[name])
            yield from _of_arguments(targets[name], value or {}, (name,))
        elif name in targets:
            yield from _of_class(value, (name,))
        elif name in descriptions:
            yield (name,), first_sentence(descriptions[name])


def _of_arguments(target: Any, values: Mapping[str, Any], path: Keys) -> Iterator[tuple[Keys, str]]:
    descriptions = described(target)
    for name, value in values.items():
        if name in descriptions:
            yield (*path, name), first_sentence(descriptions[name])
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, Mapping) and "class_path" in item:
                yield from _of_class(item, (*path, name) if index is None else (*path, name, index))


def _of_class(value: Mapping[str, Any], path: Keys) -> Iterator[tuple[Keys, str]]:
    module, _, name = str(value["class_path"]).rpartition(".")
    if refusal(f"{module}.{name}"):
        return
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # a class inside a class has no comment
        return
    if text := summary(target):
        yield (*path, "class_path"), text
    yield from _of_arguments(target, value.get("init_args") or {}, (*path, "init_args"))
