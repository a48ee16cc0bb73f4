"""The command line: finds a command in the catalogue and calls it; its exit code, help, and errors in few lines.

Only the command that is called is imported, so that listings answer without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core import __version__, catalog
from core.errors import ConfigError
from plugins.cli.error_messages import report
from plugins.cli.lean_imports import defer_compiler_and_plots, defer_torchmetrics


def main(words: Sequence[str]) -> int:
    """Runs one command; returns its exit code: 0 done, 2 a mistake that the user can correct, 130 interrupted, 143
    ended by SIGTERM.

    Args:
        words: The command and its arguments. `--debug`, anywhere among them, raises errors with their traceback.
    """
    debug = "--debug" in words
    try:
        code = _dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()
        return code
    except Exception as error:
        return report(error, debug)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except SystemExit as error:  # Lightning's, which would leave with 1 after Ctrl-C and with 0 after SIGTERM
        if isinstance(error.__context__, KeyboardInterrupt):
            return 130
        if type(error).__name__ == "SIGTERMException":
            return 143
        raise


def _dispatch(words: list[str]) -> int:
    for word in words:
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(
                f"The argument {word[:60]!a} is no text: it has a NUL character, or is not UTF-8.\n"
                "If a file or folder has this name, give it another."
            )
    if not words or words[0] in ("-h", "--help"):
        print(_commands_help())
        return 0
    if words[0] == "--version":
        print(f"leyden {__version__}")
        return 0
    defer_torchmetrics()
    defer_compiler_and_plots()
    command = catalog.find(words[0], "commands").load()
    return command(words[1:]) or 0


def _commands_help() -> str:
    """Returns what `python -m core --help` shows."""
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
