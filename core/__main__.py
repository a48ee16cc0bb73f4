"""`python -m core COMMAND ...`, also installed as `leyden`.

Every command is a technique of the group `leyden.commands`: a function that takes the arguments after
its name and returns an exit code. Only the one that is called is imported, so that help and listings
answer without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from core import __version__, catalog
from core.errors import ConfigError

MESSAGE_LINES = 10


def _put_house_first() -> None:
    """Lets `plugins`, `configs`... mean ours, whatever folders of these names the user stands in.

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
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except Exception as error:
        return _complain(error, debug)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except SystemExit as error:  # Lightning's, which would leave with 1 after Ctrl-C and with 0 after SIGTERM
        if isinstance(error.__context__, KeyboardInterrupt):
            return 130
        if type(error).__name__ == "SIGTERMException":
            return 143
        raise


def _complain(error: Exception, debug: bool) -> int:
    if isinstance(error, BrokenPipeError):  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    if debug:
        raise error
    mistake: BaseException | None = error  # jsonargparse wraps what a technique raises into errors of its own
    while mistake is not None and not isinstance(mistake, ConfigError):
        mistake = mistake.__cause__ or mistake.__context__
    from core.configuration.blame import blame

    text = blame(error) if mistake is None else str(mistake)
    print("\n".join(text.splitlines()[:MESSAGE_LINES]), file=sys.stderr)
    return 1 if mistake is None else 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"leyden {__version__}")
        return 0
    command = catalog.find(words[0], "commands").load()
    return command(words[1:]) or 0


def _help() -> str:
    commands = [entry for entry in catalog.entries() if entry.kind == "commands"]
    width = max((len(entry.name) for entry in commands), default=0)
    lines = [f"  {entry.name:<{width}}  {entry.summary()}" for entry in commands]
    return "\n".join(
        [
            "leyden trains language models; every technique is a plugin switched on in a YAML file.",
            "",
            "usage: python -m core COMMAND [arguments]      (or: leyden COMMAND [arguments])",
            "",
            *lines,
            "",
            "Start with: python -m core fit --config quickstart",
            "A command's own arguments: python -m core COMMAND --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
