"""Which modules users' folders add to our packages, and which of theirs ours hide; see :mod:`core.user_folders`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

from core.user_folders import HOUSE, PACKAGES, folders


def add(folder: Path) -> None:
    """Lets modules be imported from a folder, after those of all other folders."""
    if folder.resolve() not in (HOUSE, *folders()):
        sys.path.append(str(folder.resolve()))


def added(path: str) -> str | None:
    """Returns the module in a full path that a user's folder adds to our packages; None if there is none.

    `callbacks.mine` for `callbacks.mine.Mine`, where our `callbacks` has no `mine`.
    """
    parts = path.split(".")
    for count in range(2, len(parts) + 1) if parts[0] in PACKAGES else ():
        below = Path(*parts[:count])
        if not is_module(HOUSE / below):
            found = any(is_module(folder / below) for folder in folders())
            return ".".join(parts[:count]) if found else None
        if not (HOUSE / below).is_dir():
            return None
    return None


def hidden(path: str) -> Path | None:
    """Returns the user's file that the full path of a class would mean if our module of that name did not come first."""
    parts = path.split(".")[:-1]
    if not parts or parts[0] not in PACKAGES:
        return None
    below = Path(*parts)
    files = [below.with_suffix(".py"), below / "__init__.py"] if is_module(HOUSE / below) else []
    found = (folder / file for folder in folders() for file in files)
    return next((path for path in found if path.is_file()), None)


def all_added() -> Iterator[str]:
    """Yields every module that users' folders add to our packages, packages without what is below them."""
    for folder in folders():
        waiting = [Path(name) for name in PACKAGES if (folder / name).is_dir()]
        while waiting:
            package = waiting.pop()
            for item in (folder / package).iterdir():
                below = package / item.name.partition(".")[0]
                if not below.name.isidentifier() or not is_module(folder / below):
                    continue
                if not is_module(HOUSE / below):
                    yield ".".join(below.parts)
                elif item.is_dir() and (HOUSE / below).is_dir():
                    waiting.append(below)


def is_module(path: Path) -> bool:
    """Returns whether Python would import this path, written without its ending: a folder or a file."""
    return path.is_dir() or any(path.with_name(path.name + suffix).is_file() for suffix in all_suffixes())
