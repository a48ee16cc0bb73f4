"""Says which technique an unexpected error came from."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import suppress

from core import catalog

_DULL = ("Expected a", "Not a valid subclass")


def blame(error: BaseException, caller: str = "leyden") -> str:
    """Returns a few lines: the technique and package nearest to the error (or `caller`), what, why and where.

    Lets go of what the error's frames hold: a run may have run out of memory, and words need some too.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
    modules = {entry.module: entry for entry in catalog.entries() if entry.kind != "commands"}
    told, *causes = [link for link in _chain(error) if not _is_jsonargparses(link)] or [error]
    inner = causes[-1] if causes else told
    culprit, place = None, ""
    for frame, line in traceback.walk_tb(inner.__traceback__):
        name = frame.f_globals.get("__name__", "")
        culprit = modules.get(name, culprit)
        place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    who = f"{culprit.name} of {culprit.origin}" if culprit else caller
    lines = [f"{who} failed with {_said(told)[0]}", *_said(told)[1:4]]
    if causes:
        lines.append(f"because of {_said(inner)[0]}")
    if isinstance(inner, ModuleNotFoundError) and inner.name:
        lines.append(f"Is its package installed? pip install {inner.name.partition('.')[0]}")
    with suppress(OSError):  # the folder that the user stands in may be gone
        place = place.removeprefix(os.getcwd() + "/")
    lines.append(f"at {place}")
    return "\n".join([*lines, "Put --debug at the end of the command for the traceback."])


def useful(message: str) -> str:
    """Returns what is wrong out of jsonargparse's list of why a value fits none of a union's types."""
    _, union, errors = message.partition("Does not validate against any of the Union subtypes")
    items = re.findall(r"^( *)- (.*)", errors, re.MULTILINE)
    texts = [text for indent, text in items if indent == items[0][0]]
    if not union or not texts:
        return message
    return next((text for text in texts if not text.startswith(_DULL)), texts[-1])


def _said(error: BaseException) -> list[str]:
    return f"{type(error).__name__}: {useful(str(error).strip())}".splitlines()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and what it was raised from or while handling, outermost first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_jsonargparses(error: BaseException) -> bool:
    """Returns whether jsonargparse raised an error: it tells of another in words of its own."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].partition(".")[0] in ("argparse", "jsonargparse")
