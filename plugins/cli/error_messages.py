"""What the command line says of an error: the user's mistake, or which technique an unexpected error came from."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress

from core import catalog
from core.errors import ConfigError

MESSAGE_LINES = 10
LINE_LENGTH = 1000
"""Most characters of a line of a message: a value that it quotes may be a complete file."""
REFUSED = (
    "EACCES",
    "EDQUOT",
    "EEXIST",
    "EIO",
    "EISDIR",
    "ELOOP",
    "ENAMETOOLONG",
    "ENODEV",
    "ENOSPC",
    "ENOTDIR",
    "ENXIO",
    "EPERM",
    "EROFS",
)
"""Errors of the operating system about a path, which concern the user's files and not the code."""


def report(error: Exception, debug: bool) -> int:
    """Prints what went wrong in at most 10 lines; returns the exit code of the process.

    Args:
        error: The exception that a command raised.
        debug: Whether the error is raised again, for its traceback.
    """
    if isinstance(error, BrokenPipeError):  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    if debug:
        raise error
    links = list(chain(error))  # jsonargparse wraps what a technique raises into errors of its own
    mistake = next((link for link in links if isinstance(link, ConfigError)), None) or _of_a_path(links)
    text = explain_error(error) if mistake is None else str(mistake)
    lines = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}..." for line in text.splitlines()]
    print("\n".join(lines[:MESSAGE_LINES]), file=sys.stderr)
    return 1 if mistake is None else mistake.exit_code


def _of_a_path(errors: Iterable[BaseException]) -> ConfigError | None:
    """Returns the message for a path that the operating system refused; None for other errors."""
    for error in errors:
        if isinstance(error, OSError) and error.filename and errno.errorcode.get(error.errno or 0) in REFUSED:
            name = error.filename
            path = os.fsdecode(name) if isinstance(name, bytes) else str(name)
            shown = path if len(path) <= 200 else f"{path[:200]}..."
            return ConfigError(
                f"{shown}: {error.strerror}.\nPut --debug at the end of the command for the traceback."
            )
        if isinstance(error, ValueError) and str(error).startswith("embedded null "):
            return ConfigError(
                "A path has a NUL character in it. Take it out: in YAML it is written \\0 in double quotes."
            )
    return None


def explain_error(error: BaseException, caller: str = "leyden") -> str:
    """Returns a message: the technique nearest to the error and its package, what failed, why, and where.

    Releases what the error's frames hold: the process may be out of memory, and the message needs some.

    Args:
        error: Any error.
        caller: Named where no technique is on the error's stack.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    modules = {entry.module: entry for entry in catalog.entries() if entry.kind != "commands"}
    outer, *causes = [link for link in chain(error) if not _is_jsonargparses(link)] or [error]
    inner = causes[-1] if causes else outer
    culprit, place = None, ""
    for frame, line in traceback.walk_tb(inner.__traceback__):
        name = frame.f_globals.get("__name__", "")
        culprit = modules.get(name, culprit)
        place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    who = f"{culprit.name} of {culprit.origin}" if culprit else caller
    lines = [f"{who} failed with {_said(outer)[0]}", *_said(outer)[1:4]]
    if causes:
        lines.append(f"because of {_said(inner)[0]}")
    if isinstance(inner, ModuleNotFoundError) and inner.name:
        lines.append(f"Is its package installed? pip install {inner.name.partition('.')[0]}")
    with suppress(OSError):  # the working directory may have been deleted
        place = place.removeprefix(os.getcwd() + "/")
    lines.append(f"at {place}")
    return "\n".join([*lines, "Put --debug at the end of the command for the traceback."])


def _said(error: BaseException) -> list[str]:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and what it was raised from or while handling, outermost first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_jsonargparses(error: BaseException) -> bool:
    """Returns whether jsonargparse raised an error: it wraps what a constructor raised."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].partition(".")[0] in ("argparse", "jsonargparse")
