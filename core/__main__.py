"""`python -m core COMMAND ...`, also installed as `leyden`.

Every command is a technique of the group `leyden.commands`: a function that takes the arguments after
its name and returns an exit code. So is the command line: the module of the command that offers "command_line" has
`main(words)`, which finds the command in the catalogue, calls it, and shows help and errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent
if "core" in sys.modules and HOUSE / "core" not in map(Path.resolve, map(Path, sys.modules["core"].__path__)):
    # `python -m core` has imported a folder `core` of the working directory, which hides an editable installation.
    for name in [name for name in sys.modules if name.partition(".")[0] == "core"]:
        del sys.modules[name]
    sys.path.insert(0, str(HOUSE))

from core import catalog  # noqa: E402


def _put_house_first() -> None:
    """Lets `plugins`, `configs`... mean ours, also if the working directory has folders of these names.

    The user's folder comes last: `leyden`, too, finds a class in a module that lies there.
    """
    house, here = str(HOUSE), os.getcwd()
    if house not in sys.path:
        sys.path.insert(0, house)
    if here != house:
        sys.path[:] = [*(path for path in sys.path if path not in ("", here)), here]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 2 a mistake that the user can correct, 130 interrupted,
    143 ended by SIGTERM.
    """
    _put_house_first()
    command_line = catalog.offering("command_line", "commands")
    command_line.load()
    code: int = sys.modules[command_line.module].main(sys.argv[1:] if arguments is None else arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
