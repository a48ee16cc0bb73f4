"""`plugins check`: imports every technique of a package and says what is wrong with it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any

from core import catalog
from core.errors import ConfigError, nearest
from core.technique import declaration_of
from plugins.commands.plugins_docstrings import documented, example_problem, parameters, sections
from plugins.commands.plugins_terminal import print_table

BASES = {
    "callbacks": "lightning.pytorch.callbacks.Callback",
    "checkpoints": "lightning.fabric.plugins.CheckpointIO",
    "datamodules": "lightning.pytorch.LightningDataModule",
    "loggers": "lightning.pytorch.loggers.Logger",
    "networks": "core.contracts.Network",
    "objectives": "core.contracts.Objective",
    "optimizers": "torch.optim.Optimizer",
    "precision": "lightning.fabric.plugins.Precision",
    "schedules": "torch.optim.lr_scheduler.LRScheduler",
    "strategies": "lightning.pytorch.strategies.Strategy",
}
"""Kind -> what its classes derive from. Adapters and stages have several contracts and are not held to one."""


def check(package: str | None) -> int:
    """Prints a row for each technique of a package, or of all, and what is wrong; returns 1 if anything is.

    Raises:
        ConfigError: If no such package registers anything.
    """
    chosen = [entry for entry in catalog.entries() if package is None or _same(entry.package, package)]
    strays = sorted(set(_strays(package)))
    if not chosen and not strays:
        packages = {entry.package for entry in catalog.entries()}
        raise ConfigError(
            f"No installed package named {package!r} registers a technique.{nearest(package or '', packages)}\n"
            f"These do: {', '.join(sorted(packages))}. After a change to pyproject.toml, `pip install -e .` again."
        )
    rows = [("kind", "name", "package", "result")]
    for entry in chosen:
        problems = list(_problems(entry)) or ["ok"]
        rows.append((entry.kind, entry.name, entry.origin, problems[0]))
        rows += [("", "", "", problem) for problem in problems[1:]]
    print_table(rows + strays)
    broken = sum(row[0] != "" and row[3] != "ok" for row in rows[1:]) + len(strays)
    print(f"\n{len(chosen) + len(strays)} checked, {broken} broken.")
    return 1 if broken else 0


def _same(one: str, other: str) -> bool:
    """Whether two spellings name one distribution, as pip compares them (PEP 503)."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(one) == canonicalize_name(other)


def _strays(package: str | None) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each entry in a group that looks like one of ours but is none."""
    groups = {f"leyden.{kind}" for kind in catalog.KINDS}
    for distribution in distributions():
        name = str(distribution.metadata["Name"])
        if package is not None and not _same(name, package):
            continue
        for point in distribution.entry_points:
            if point.group.startswith("leyden.") and point.group not in groups:
                kind, said = point.group.removeprefix("leyden."), f"there is no group {point.group}."
                yield kind, point.name, f"{name} {distribution.version}", said + nearest(point.group, groups)


def _problems(entry: catalog.Entry) -> Iterator[str]:
    rivals = [e for e in catalog.entries() if (e.kind == "commands") == (entry.kind == "commands")]
    same = [e.origin for e in rivals if e.name == entry.name]
    if len(same) > 1:
        yield f"registered {len(same)} times ({', '.join(same)}): only the full path can be used"
    try:
        target = entry.load()
    except (ConfigError, SystemExit) as error:
        yield (str(error).splitlines() or ["ends the process when it is imported"])[0]
        return
    if getattr(target, "__name__", None) != entry.name:
        yield f"the entry is named {entry.name}, what it leads to {getattr(target, '__name__', target)!r}"
    yield from _form(entry, target)
    yield from _documentation(entry, target)


def _form(entry: catalog.Entry, target: Any) -> Iterator[str]:
    declaration = declaration_of(target)
    if declaration is None:
        yield "not declared: put @technique(paper=...) on it"
    elif not declaration.paper.strip():
        yield "@technique(paper=...) is empty: name the paper or source"
    if entry.kind == "commands":
        if not callable(target) or inspect.isclass(target):
            yield "a command is a function that takes the arguments after its name"
        return
    if not inspect.isclass(target):
        yield f"not a class but a {type(target).__name__}"
        return
    if path := BASES.get(entry.kind):
        module, _, name = path.rpartition(".")
        if not issubclass(target, getattr(importlib.import_module(module), name)):
            yield f"does not derive from {path}"
    if inspect.isabstract(target):
        yield f"cannot be built: {', '.join(sorted(getattr(target, '__abstractmethods__', ())))} is not written"


def _documentation(entry: catalog.Entry, target: Any) -> Iterator[str]:
    told = sections(getattr(target, "__doc__", None))
    if not told[""]:
        yield "no docstring"
        return
    described = documented(told.get("Args", ""))
    missing = [name for name in parameters(target) if name not in described]
    if missing:
        yield f"`Args:` does not describe {', '.join(missing)}"
    unknown = [name for name in described if inspect.isclass(target) and name not in parameters(target)]
    if unknown:
        yield f"`Args:` describes what is no argument: {', '.join(unknown)}"
    if entry.kind != "commands" or "Example" in told:
        problem = example_problem(entry, told.get("Example", ""))
        if problem:
            yield problem
