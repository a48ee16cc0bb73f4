"""`python -m core COMMAND ...`, also installed as `leyden`.

Every command is a technique of the group `leyden.commands`: a function that takes the arguments after
its name and returns an exit code. Only the one that is called is imported, so that listings answer without torch.

How errors and the list of commands are shown is the command line's: the module of the command that offers
"command_line" has `report(error, debug)`, which returns an exit code, and `commands_help()`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if getattr(sys.modules.get("core"), "__file__", "") is None:
    # A folder `core` in the working directory, without __init__.py, hides the package of an editable installation.
    del sys.modules["core"]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core import __version__, catalog
from core.errors import ConfigError


def _put_house_first() -> None:
    """Lets `plugins`, `configs`... mean ours, also if the working directory has folders of these names.

    The user's folder comes last: `leyden`, too, finds a class in a module that lies there.
    """
    house, here = str(Path(__file__).resolve().parent.parent), os.getcwd()
    if house not in sys.path:
        sys.path.insert(0, house)
    if here != house:
        sys.path[:] = [*(path for path in sys.path if path not in ("", here)), here]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 2 a mistake that the user can mend, 130 interrupted,
    143 ended by SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    _put_house_first()
    found = None
    try:
        found = catalog.offering("command_line", "commands")  # now: a run may leave no memory to look for it
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except Exception as error:
        return int(_command_line(found).report(error, debug))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except SystemExit as error:  # Lightning's, which would leave with 1 after Ctrl-C and with 0 after SIGTERM
        if isinstance(error.__context__, KeyboardInterrupt):
            return 130
        if type(error).__name__ == "SIGTERMException":
            return 143
        raise


def _command_line(found: catalog.Entry | None = None) -> Any:
    entry = found or catalog.offering("command_line", "commands")
    entry.load()
    return sys.modules[entry.module]


def _dispatch(words: list[str]) -> int:
    for word in words:
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(
                f"The argument {word[:60]!a} is no text: it has a NUL character, or is not UTF-8.\n"
                "If a file or folder has this name, give it another."
            )
    if not words or words[0] in ("-h", "--help"):
        print(_command_line().commands_help())
        return 0
    if words[0] == "--version":
        print(f"leyden {__version__}")
        return 0
    command = catalog.find(words[0], "commands").load()
    return command(words[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
