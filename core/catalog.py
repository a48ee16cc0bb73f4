"""The catalogue of techniques: Python entry points, one group per kind, read without importing them.

An entry `Name = "package.module:Class"` in the group `leyden.<kind>` makes `Name` a short name in YAML.
A module is imported only when a run names it, so that a broken package hurts nobody else.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, entry_points, requires
from pathlib import Path
from typing import Any

from core import API_VERSION, __version__
from core.errors import ConfigError, deprecated, nearest

__all__ = ["Entry", "by_class_path", "entries", "find", "offering"]

KINDS = (
    "adapters",
    "callbacks",
    "checkpoints",
    "commands",
    "data",
    "datamodules",
    "evaluations",
    "loggers",
    "networks",
    "objectives",
    "optimizers",
    "precision",
    "rewards",
    "schedules",
    "strategies",
)


FORMER_KIND = "stages"
"""What "data" was called up to core API 1.3."""


def new_kind(kind: str, where: str) -> str:
    """Returns the kind, under its present name."""
    if kind == FORMER_KIND:
        deprecated(where, "data")
        return "data"
    return kind


@dataclass(frozen=True)
class Entry:
    """One registered technique: where it lives and which package brought it."""

    name: str
    kind: str
    module: str
    attribute: str
    package: str
    version: str

    @property
    def class_path(self) -> str:
        """The full dotted path, as jsonargparse writes it; the name where the registration is no path."""
        path = f"{self.module}.{self.attribute}"
        return path if all(part.isidentifier() for part in path.split(".")) else self.name

    @property
    def origin(self) -> str:
        """The package with its version, for messages."""
        return f"{self.package} {self.version}"

    def load(self) -> Any:
        """Imports the technique.

        Raises:
            ConfigError: If its package requires another leyden, its module cannot be imported or lacks the
                attribute; names the package.
        """
        self._check_versions()
        try:
            return getattr(importlib.import_module(self.module), self.attribute)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            api = str(self.declared("api") or "")
            advice = upgrade(api, API_VERSION, self.package)
            raise ConfigError(
                f"{self.name} of {self.origin} cannot be imported: {what}\n"
                f"It is registered as {self.module}:{self.attribute} in the group leyden.{self.kind}.\n"
                + (f"It was written for core API {api}, this is {API_VERSION}: {advice}\n" if advice else "")
                + f"Reinstall or repair {self.package}, or take {self.name} out of the run."
            ) from error

    def _check_versions(self) -> None:
        """Raises a ConfigError where the package's metadata require another leyden than this one."""
        if self.package in ("leyden", "?"):
            return
        from packaging.requirements import InvalidRequirement, Requirement

        for line in requires(self.package) or ():
            with contextlib.suppress(InvalidRequirement):
                needed = Requirement(line)
                if needed.name.lower() != "leyden" or (needed.marker and not needed.marker.evaluate()):
                    continue
                if advice := upgrade(wanted := str(needed.specifier), __version__, self.package):
                    raise ConfigError(
                        f"{self.name} of {self.origin} requires leyden{wanted}, {__version__} is installed: {advice}"
                    )

    def summary(self) -> str:
        """Returns the first line of the docstring, read with `ast`; empty where there is no source."""
        node = definition(self.module, self.attribute)
        return (ast.get_docstring(node) or "").split("\n")[0] if node else ""

    def declared(self, field: str) -> Any:
        """Returns a literal argument of `@technique`, read with `ast`; None if it is absent or not a literal."""
        node = definition(self.module, self.attribute, f"{field}=")
        for call in node.decorator_list if node else ():
            for argument in call.keywords if isinstance(call, ast.Call) else ():
                if argument.arg == field:
                    with contextlib.suppress(ValueError):
                        return ast.literal_eval(argument.value)
        return None


def upgrade(wanted: str, found: str, package: str) -> str | None:
    """Returns what to upgrade, leyden or `package`, as a pip line; None where `found` is as `wanted`.

    Args:
        wanted: The versions that the package was written for, such as ">=1,<2".
        found: The version of leyden, or of its API.
        package: The distribution that wants them.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    try:
        specifiers = SpecifierSet(wanted)
    except InvalidSpecifier:
        return f"{package} has to write {wanted!r} as a range of versions, such as '>=1,<2'"
    if specifiers.contains(found, prereleases=True):
        return None
    least = [s.version.removesuffix(".*") for s in specifiers if s.operator in (">", ">=", "~=", "==")]
    behind = any(Version(version) > Version(found) for version in least)
    return f"pip install --upgrade {'leyden' if behind else package}"


def definition(module: str, name: str, containing: str = "") -> ast.ClassDef | ast.FunctionDef | None:
    """Returns the definition of a class or function; None also where the file lacks a text, which saves parsing it."""
    path = source_file(module)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        nodes = _parsed(text).body if containing in text else []
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return next((n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)


_parsed = cache(ast.parse)
"""Parses a module's source once: each run asks several times what the techniques declare."""


def source_file(module: str) -> Path | None:
    """Finds a module's file without importing its parent packages, which may be broken or slow."""
    head, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        return None
    if spec is None or not rest:
        return Path(spec.origin) if spec and spec.origin else None
    bases = (Path(folder, *rest) for folder in spec.submodule_search_locations or ())
    files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


@cache
def entries() -> tuple[Entry, ...]:
    """Returns every registered technique of every installed package, sorted by kind and name."""
    points = entry_points()  # all groups at once: each call reads the files again
    found = set()
    for kind in (*KINDS, FORMER_KIND):
        for point in points.select(group=f"leyden.{kind}"):
            # not point.module and point.attr: they fail on a malformed value, and everybody's run with it
            module, _, attribute = point.value.partition("[")[0].partition(":")
            kind = new_kind(kind, f"the group of {point.name}, leyden.{kind},")
            found.add(Entry(point.name, kind, module.strip(), attribute.strip(), *_origin(point.dist)))
    return tuple(sorted(found, key=lambda entry: (entry.kind, entry.name, entry.package)))


@cache
def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Returns name and version of a distribution, as far as it says; reading them takes a millisecond."""
    metadata: Any = {}
    with contextlib.suppress(FileNotFoundError):  # newer versions raise it where the file is missing
        metadata = distribution.metadata if distribution else {}
    return metadata.get("Name") or "?", metadata.get("Version") or "?"


def find(name: str, kind: str | None = None) -> Entry:
    """Returns the one technique with this short name or full path.

    Raises:
        ConfigError: If the name is unknown (names the nearest) or registered by two packages.
    """
    kind = kind and new_kind(kind, 'The kind "stages"')
    pool = [entry for entry in entries() if kind is None or entry.kind == kind]
    matches = [entry for entry in pool if name in (entry.name, entry.class_path)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        lines = "\n".join(f"  {entry.class_path}  (from {entry.origin})" for entry in matches)
        raise ConfigError(f"{name} is registered by {len(matches)} packages; write the full path:\n{lines}")
    what, hint = (kind or "techniques").removesuffix("s"), nearest(name, {entry.name for entry in pool})
    raise ConfigError(f"There is no {what} named {name!r}.{hint}\nSee `python -m core plugins list`.")


def offers(feature: str, kind: str | None = None) -> list[Entry]:
    """Returns the techniques, of a kind or of all, whose `@technique` offers a feature, as literals in their source."""
    return [e for e in entries() if kind in (None, e.kind) and feature in (e.declared("offers") or ())]


def offering(feature: str, kind: str) -> Entry:
    """Returns the one technique of a kind that offers a feature, see :func:`offers`.

    Raises:
        ConfigError: If none does, or several do.
    """
    found = offers(feature, kind)
    if len(found) == 1:
        return found[0]
    names = "".join(f"\n  {entry.class_path}  (from {entry.origin})" for entry in found)
    raise ConfigError(
        f"{len(found) or 'No'} techniques of the kind {kind} offer {feature}, one has to:{names}\n"
        "Uninstall the packages of the others, or reinstall leyden."
    )


def by_class_path(class_path: str) -> Entry | None:
    """Returns the entry registered under a full dotted path, or None."""
    return next((entry for entry in entries() if entry.class_path == class_path), None)
