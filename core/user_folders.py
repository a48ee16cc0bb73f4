"""Modules in a user's folder that is named like one of our packages: `callbacks/mine.py`, `plugins/networks/x.py`.

Python takes a package from the first folder that has it: either our `callbacks` would hide the user's, or theirs ours.
With the finder below the package is always ours, and what it does not have is looked for in the folders of that name on
`sys.path`. Our modules are never replaced. A user's folder needs no `__init__.py`, and none is run.

Processes that are spawned inherit `sys.path`, and import `core` with their main module: they find the same modules.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parent.parent
PACKAGES = ("callbacks", "configs", "conformance", "core", "datamodules", "plugins", "toolkit")


class _Finder:
    """Finds our packages and their modules in our folder, then modules in the users' folders of the same names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        *parents, _ = name.split(".")
        if name.partition(".")[0] not in PACKAGES:
            return None
        if found := PathFinder.find_spec(name, [str(HOUSE.joinpath(*parents))]):
            return found
        places = [folder.joinpath(*parents) for folder in folders()]
        return PathFinder.find_spec(name, [str(place) for place in places if place.is_dir()])


def install() -> None:
    """Lets Python find the users' modules, and ours where a script has imported its own `callbacks` before."""
    if _Finder not in sys.meta_path:
        # In front of what searches sys.path, but behind what pytest and debuggers put first.
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder)
    for name, module in list(sys.modules.items()):
        ours = HOUSE.joinpath(*name.split("."))
        places = list(getattr(module, "__path__", ())) if name.partition(".")[0] in PACKAGES else []
        if places and ours.is_dir() and str(ours) not in places:
            module.__path__ = [str(ours), *places]


def folders() -> list[Path]:
    """Returns the folders on `sys.path`, in order, but for ours."""
    found = (Path(entry or os.curdir) for entry in sys.path)
    resolved = dict.fromkeys(path.resolve() for path in found if path.is_dir())
    return [path for path in resolved if path != HOUSE]
