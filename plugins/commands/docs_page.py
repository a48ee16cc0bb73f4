"""The page of one technique, as Markdown: from its declaration, its signature and its docstring."""

from __future__ import annotations

import ast
import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from core import catalog
from core.errors import ConfigError
from core.technique import Declaration, declaration_of
from plugins.cli.configuration.config_files import configs_folder
from plugins.cli.configuration.docstrings import described, documented, plain, sections
from plugins.cli.configuration.signatures import REQUIRED, parameters

GIVEN = {"optimizers": 1, "schedules": 1}
"""Kind -> how many of the first arguments the run supplies: parameters, or the optimizer."""


def _home() -> Path:
    """Returns the folder of what is written by hand: the checkout, or where the installed package has it."""
    house = configs_folder().parent
    installed = [file.locate() for file in metadata.files("leyden") or () if file.name == "first-run.md"]
    places = [house, house / "share" / "leyden"]  # the second: pip install --target
    places += [Path(str(file)).resolve().parent.parent for file in installed]
    return next((place for place in places if (place / "docs" / "first-run.md").is_file()), house)


HOUSE = _home()


class Pages:
    """Where the page of each technique is, and what techniques declare about each other.

    Args:
        entries: All techniques of the site.
    """

    def __init__(self, entries: Sequence[catalog.Entry]) -> None:
        self.entries = entries
        files = Counter((entry.kind, _file(entry.name).lower()) for entry in entries)
        self._paths = {}
        for entry in entries:
            name = _file(entry.name)
            if files[entry.kind, name.lower()] > 1:  # two packages, or names that differ in case alone
                name = f"{_file(entry.package)}.{_file(entry.module)}.{name}"
            self._paths[entry] = f"techniques/{entry.kind}/{name}.md"

    def path(self, entry: catalog.Entry) -> str:
        """Returns the page of a technique, relative to the root of the site."""
        return self._paths[entry]

    def relative(self, entry: catalog.Entry, folder: str) -> str:
        """Returns the page of a technique, relative to a folder of the site."""
        return os.path.relpath(self._paths[entry], folder)

    def link(self, name: str, folder: str) -> str:
        """Returns a technique's name as a link to its page, or as code where it has none."""
        found = [entry for entry in self.entries if entry.name == name and entry.kind != "commands"]
        return f"[{line(name)}]({self.relative(found[0], folder)})" if len(found) == 1 else code(name)

    @cached_property
    def declared(self) -> dict[catalog.Entry, Declaration]:
        """The declarations of all techniques that can be imported and have one."""
        found = {}
        for entry in self.entries:
            target, _ = _loaded(entry)
            declaration = declaration_of(target) if target is not None else None
            if declaration is not None:
                found[entry] = declaration
        return found


def page(entry: catalog.Entry, pages: Pages) -> str:
    """Returns everything about one technique.

    The technique is imported. One that cannot be imported has a page too, from its source, which says why.
    """
    folder = pages.path(entry).rpartition("/")[0]
    target, problem = _loaded(entry)
    said = sections(target.__doc__ if target is not None else _docstring(entry))
    declaration = pages.declared.get(entry)
    head = [code(entry.kind), f"from {line(entry.origin)}"]
    head += [line(declaration.maturity)] if declaration else []
    blocks = [
        ("", " · ".join(head)),
        ("", f"**It cannot be imported here.** {line(problem)}" if problem else ""),
        ("", prose(said[""])),
        ("", _picture(entry)),
        ("Options", _options(entry)),
        ("Use", _use(entry, said)),
        ("Arguments", _arguments(entry, target, _texts(target, said))),
        *((title, _items(said.get(title, ""))) for title in ("Attributes", "Raises", "Returns")),
        ("Needs and conflicts", _declared(entry, declaration, pages, folder)),
        ("Runs with", _compatibility(entry, pages, folder)),
        ("Source", _source(entry, declaration)),
    ]
    shown = [f"## {title}\n\n{text}" if title else text for title, text in blocks if text]
    return f"# {line(entry.name)}\n\n" + "\n\n".join(shown) + "\n"


def line(text: str) -> str:
    """Returns text as Markdown of one line, for headings and lists; what is in backquotes is code."""
    parts = re.split(r"`+([^`]+)`+", " ".join(plain(text).split()))
    text = "".join(code(part) if index % 2 else _escaped(part) for index, part in enumerate(parts))
    return re.sub(r"^(\d*)([-=.)])", r"\1\\\2", text)  # no list, heading or rule begins here


def row(*cells: str) -> str:
    """Returns a row of a table; cells are Markdown of one line."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def code(text: str) -> str:
    """Returns text as code within a line."""
    text = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`" if text else ""


def block(text: str, language: str = "text") -> str:
    """Returns text as a block of code that nothing in it can end."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def prose(text: str) -> str:
    """Returns a docstring's prose: paragraphs and lists as such, what is indented as code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        if all(one.startswith((" ", "\t")) for one in lines) and lines:
            found.append(block(textwrap.dedent(paragraph)))
        elif re.match(r"[-*] ", paragraph):
            items = re.split(r"\n(?=[-*] )", paragraph)
            found.append("\n".join(f"- {line(item[2:])}" for item in items))
        else:
            found.append(line(paragraph))
    return "\n\n".join(part for part in found if part)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]()<>#+!~$&^:])", r"\\\1", text)


def _file(name: str) -> str:
    """Returns a name for a file; whatever a package registers, it leads nowhere else."""
    return re.sub(r"[^\w-]", "-", name, flags=re.ASCII) or "-"


@cache
def _loaded(entry: catalog.Entry) -> tuple[Any, str]:
    """Returns the technique, or None and why it cannot be imported."""
    try:
        return entry.load(), ""
    except ConfigError as error:
        return None, str(error).splitlines()[0]


def _docstring(entry: catalog.Entry) -> str:
    """Returns the docstring of a technique that cannot be imported, from its source."""
    path = catalog.source_file(entry.module)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == entry.attribute:
            return ast.get_docstring(node) or ""
    return ""


def _picture(entry: catalog.Entry) -> str:
    """Returns the picture that a benchmark drew of it, if there is one: docs/pictures/NAME.png."""
    name = f"docs/pictures/{_file(entry.name)}.png"
    there = entry.package == "leyden" and (HOUSE / name).is_file()
    return f"![What {line(entry.name)} does](../../{name})" if there else ""


def _use(entry: catalog.Entry, said: Mapping[str, str]) -> str:
    example = said.get("Example", "") or said.get("Examples", "")
    parts = [block(example, "sh" if entry.kind == "commands" else "yaml")] if example else []
    overlay = configs_folder() / "techniques" / f"{overlay_name(entry.name)}.yaml"
    if entry.package == "leyden" and overlay.is_file():
        parts += [
            "Or as an overlay over any config:",
            block(f"python -m core fit --config quickstart --config techniques/{overlay.stem}", "sh"),
        ]
    return "\n\n".join(parts)


def overlay_name(name: str) -> str:
    """Returns the name of a technique's overlay: spike_rollback for SpikeRollback."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z]{2}|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _texts(target: Any, said: Mapping[str, str]) -> dict[str, str]:
    """Returns argument -> description, also of arguments that a base class describes."""
    return described(target) if target is not None else documented(said.get("Args", ""))


def _arguments(entry: catalog.Entry, target: Any, said: Mapping[str, str]) -> str:
    rows = ["| argument | type | default | meaning |", "| --- | --- | --- | --- |"]
    if entry.kind == "commands":  # it takes the words after its name
        return ""
    if target is None:
        rows += [row(code(name), "", "", line(text)) for name, text in said.items()]
        return "\n".join(rows) if said else ""
    found = parameters(target)[0]
    for index, (name, argument) in enumerate(found.items()):
        default = "required" if argument.default is REQUIRED else code(_value(argument.default))
        default = "given by the run" if index < GIVEN.get(entry.kind, 0) else default
        rows.append(row(code(name), code(argument.written), default, line(said.get(name, ""))))
    return "\n".join(rows) if found else "None."


def _value(default: Any) -> str:
    """Returns a default as it is written; of a class or function its name, which is the same in each process."""
    text = getattr(default, "__qualname__", repr(default))
    return re.sub(r"<(?:[\w.]+\.)?(\w+)( object)? at 0x\w+>", r"\1()", text)


def _options(entry: catalog.Entry) -> str:
    """Returns what a command takes, as far as its source declares it, with those of each subcommand after it."""
    if entry.kind != "commands":
        return ""
    from plugins.commands.completion_sources import command_words

    words = command_words(entry.module)
    rows = []
    for word in sorted(words, key=lambda word: (word.parent, word.kind == "subcommand")):
        value = f"{{{','.join(word.choices)}}}" if word.choices else word.metavar
        name = value if word.kind == "positional" and value else word.name
        name += f" {value}" if word.kind == "option" and value else ""
        rows.append(row(code(f"{word.parent} {name}"), line(word.text)))
    table = "\n".join(["| option | meaning |", "| --- | --- |", *rows, ""]) if rows else ""
    return f"{table}\n{code(f'python -m core {entry.name} --help')} shows all options."


def _items(section: str) -> str:
    """Returns a section of a docstring as a list: each item begins without indentation."""
    items = re.split(r"\n(?=\S)", section) if section else []
    return "\n".join(f"- {line(item)}" for item in items)


def _declared(entry: catalog.Entry, own: Declaration | None, pages: Pages, folder: str) -> str:
    if own is None:
        return ""
    lines = [f"- Needs {line(str(need))}." for need in own.needs]
    refused = _conflicts(entry, pages)
    lines += [
        f"- Not with {pages.link(name, folder)}: {line(reason)}" for name, reason in sorted(refused.items())
    ]
    for owned in own.owns:
        rivals = [
            pages.link(other.name, folder)
            for other, declaration in pages.declared.items()
            if other != entry and owned in declaration.owns
        ]
        also = f"; not with {', '.join(rivals)}" if rivals else ""
        lines.append(f"- The only one of a run to control: {line(owned.replace('_', ' '))}{also}.")
    lines += [f"- Offers {code(name)}." for name in own.offers]
    for order, names in (("before", own.before), ("after", own.after)):
        if names:
            lines.append(f"- Its hooks fire {order} those of {_joined(names, pages, folder)}.")
    if own.observer:
        lines.append("- It only observes: with it, losses and weights are the same as without it.")
    if own.api:
        lines.append(f"- Written for core API {code(own.api)}.")
    return "\n".join(lines) or "None declared."


def _conflicts(entry: catalog.Entry, pages: Pages) -> dict[str, str]:
    """Returns what a technique is refused with, and why, whichever of the two declares it."""
    own = pages.declared.get(entry)
    found = dict(own.conflicts) if own else {}
    for other, declaration in pages.declared.items():
        if entry.name in declaration.conflicts and entry.kind != "commands":
            found.setdefault(other.name, declaration.conflicts[entry.name])
    return found


def _joined(names: Sequence[str], pages: Pages, folder: str) -> str:
    return ", ".join(pages.link(name, folder) for name in names)


def _compatibility(entry: catalog.Entry, pages: Pages, folder: str) -> str:
    """Returns its row of the compatibility table; see `tests/conformance/compatibility.py`."""
    if entry.package != "leyden":
        return ""
    rows = ["| with | result |", "| --- | --- |"]
    trained = []
    conflicts = _conflicts(entry, pages)
    for name, result in sorted(_results(entry.name)):
        said, _, reason = result.partition(": ")
        if said == "yes":
            trained.append(name)
            continue
        reason = reason or conflicts.get(name, "")
        why = f": {line(reason)}" if reason else ""
        rows.append(row(pages.link(name, folder), f"{line(said)}{why}"))
    together = [f"Trained together with {_joined(trained, pages, folder)}."] if trained else []
    return "\n\n".join([*together, *(["\n".join(rows)] if len(rows) > 2 else [])])


def _results(name: str) -> Iterator[tuple[str, str]]:
    for first, others in _tried().items():
        if first == name:
            yield from others.items()
        elif name in others:
            yield first, others[name]


@cache
def _tried() -> dict[str, dict[str, str]]:
    """Returns technique -> other technique or setting -> "yes", "refused" where it is declared why, or "refused: why"."""
    path = configs_folder() / "compatibility.json"
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))["pairs"]
    return found


def _source(entry: catalog.Entry, own: Declaration | None) -> str:
    lines = [f"- {line(own.paper)}"] if own and own.paper else []
    lines.append(f"- {code(entry.class_path)}, package {line(entry.origin)}")
    return "\n".join(lines)
