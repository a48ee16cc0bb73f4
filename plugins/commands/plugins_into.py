"""`plugins new --into`: adds a technique that works to a package that is there already."""

from __future__ import annotations

import copy
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core import durable
from core.errors import ConfigError


class Package:
    """A project on the disk that a technique is added to.

    Args:
        folder: The folder of its pyproject.toml.

    Attributes:
        name: The distribution's.
        module: The import name of its Python package.

    Raises:
        ConfigError: If there is no pyproject.toml that can be read, or no one package to add a module to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        # resolved: a link stays a link
        self._path = self.folder.joinpath("pyproject.toml").resolve()
        try:
            # bytes: the line ends stay as they are
            self._text = self._path.read_bytes().decode("utf-8")
            self._data = tomllib.loads(self._text)
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"--into {folder}: {self.folder / 'pyproject.toml'}: {said}. Give the folder of a package that "
                "`plugins new` or another tool has made."
            ) from error
        project = self._data.get("project")
        name = project.get("name") if isinstance(project, dict) else None
        if not isinstance(name, str):
            raise ConfigError(f"--into {folder}: its pyproject.toml has no [project] with a name.")
        self.name = name
        self.module, self._home = self._package()

    def add(self, kind: str, name: str, attribute: str, word: str, files: tuple[str, str]) -> list[Path]:
        """Writes a module, its test and the entry point; all of it, or nothing.

        Args:
            kind: Of the technique.
            name: Its registered name.
            attribute: The class or function.
            word: The module's name.
            files: The module's text and the test's.

        Raises:
            ConfigError: If a file is in the way, or one cannot be written.
        """
        target = f"{self.module}.{word}:{attribute}"
        changed = self._with_entry(kind, name, target)
        new = dict(zip((self._home / f"{word}.py", self._tests() / f"test_{word}.py"), files, strict=True))
        with all_or_none(new), durable.replacing(self._path) as temporary:
            temporary.write_bytes(changed.encode())
            shutil.copymode(self._path, temporary)
        return [*new, self.folder / "pyproject.toml"]

    def _package(self) -> tuple[str, Path]:
        """Returns name and folder of the Python package: that of techniques it has, or named as it is, or the only one."""
        roots = [self.folder, self.folder / "src"]
        there = {
            path.name: path
            for root in roots
            for path in (sorted(root.iterdir()) if root.is_dir() else ())
            if (path / "__init__.py").is_file() and path.name.isidentifier()
        }
        groups = self._groups()
        listed = [
            path
            for group, entries in groups.items()
            if group.startswith("leyden.")
            for path in entries.values()
        ]
        used = {str(path).partition(":")[0].partition(".")[0] for path in listed} & set(there)
        own = {re.sub(r"[-_.]+", "_", str(self.name)).lower()} & set(there)
        others = set(there) - {"tests", "test", "docs", "examples"}
        found = next((names for names in (used, own, others) if len(names) == 1), None)
        if found is None:
            what = (
                f"several packages ({', '.join(sorted(others))})"
                if others
                else "no package with an __init__.py"
            )
            raise ConfigError(
                f"--into {self.folder}: there is {what}: it is not known where the module belongs."
            )
        [name] = found
        return name, there[name]

    def _groups(self) -> Mapping[str, Mapping[str, Any]]:
        found = self._data["project"].get("entry-points")
        items = found.items() if isinstance(found, dict) else ()
        return {group: entries for group, entries in items if isinstance(entries, dict)}

    def _tests(self) -> Path:
        options: Any = self._data
        for key in ("tool", "pytest", "ini_options", "testpaths"):
            options = options.get(key) if isinstance(options, dict) else None
        words = options.split() if isinstance(options, str) else options
        first = str(words[0]) if isinstance(words, list) and words else "tests"
        inside = (self.folder / first).resolve().is_relative_to(self.folder.resolve())
        return self.folder / (first if inside and not set("*?[") & set(first) else "tests")

    def _with_entry(self, kind: str, name: str, target: str) -> str:
        """Returns pyproject.toml with one line more; it is read back, and has to say that and all it said before."""
        group, line = f"leyden.{kind}", f'{name} = "{target}"'
        if name in self._groups().get(group, {}):
            raise ConfigError(f"--into {self.folder}: {name} is there already, in the group {group}.")
        expected = copy.deepcopy(self._data)
        with suppress(AttributeError, TypeError):  # entry points that are no tables: refused below
            expected["project"].setdefault("entry-points", {}).setdefault(group, {})[name] = target
        end = "\r\n" if "\r\n" in self._text else "\n"
        lines = self._text.split(end)
        header = rf"""\s*\[\s*project\s*\.\s*entry-points\s*\.\s*["']{re.escape(group)}["']\s*\]\s*(#.*)?"""
        at = next((number for number, text in enumerate(lines) if re.fullmatch(header, text)), None)
        if at is None:
            text = self._text.rstrip() + f'{end}{end}[project.entry-points."{group}"]{end}{line}{end}'
        else:
            rest = [text.strip() for text in lines[at + 1 :]]
            length = next((number for number, text in enumerate(rest) if text.startswith("[")), len(rest))
            entries = [
                number for number in range(length) if rest[number] and not rest[number].startswith("#")
            ]
            lines.insert(at + 2 + max(entries, default=-1), line)
            text = end.join(lines)
        with suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(text) == expected and "entry-points" not in self._data["project"].get(
                "dynamic", []
            ):
                return text
        raise ConfigError(
            f"--into {self.folder}: its pyproject.toml writes entry points in a way that cannot be added to. Nothing was "
            f'written. Add a table [project.entry-points."{group}"] by hand, and try again.'
        )


@contextmanager
def all_or_none(files: Mapping[Path, str]) -> Iterator[None]:
    """Writes new files before the body; removes them if the body, or writing one of them, fails.

    Raises:
        ConfigError: If one is there already, or cannot be written.
    """
    there = [path for path in files if os.path.lexists(path)]
    if there:
        names = ", ".join(map(str, there[:3])) + (" and more" if len(there) > 3 else "")
        raise ConfigError(f"There is {names} already: nothing was written.\nChoose another name or folder.")
    made: list[Path] = []
    try:
        for path, text in files.items():
            missing = [folder for folder in path.parents if not os.path.exists(folder)]
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                made.append(folder)
            with open(path, "x", encoding="utf-8") as file:
                made.append(path)
                file.write(text)
        yield
    except BaseException as error:
        for path in reversed(made):
            with suppress(OSError):  # a folder that another process writes to stays
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{error.filename}: {error.strerror}. Nothing was written. Choose another folder."
            ) from error
        raise
