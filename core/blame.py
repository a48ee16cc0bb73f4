"""Says which technique an unexpected error came from."""

from __future__ import annotations

import os
import traceback

from core import catalog


def blame(error: BaseException) -> str:
    """Returns a few lines: the technique and package nearest to the error, what it was and where."""
    modules = {entry.module: entry for entry in catalog.entries() if entry.kind != "commands"}
    culprit, place = None, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        culprit = modules.get(name, culprit)
        place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    who = f"{culprit.name} of {culprit.origin}" if culprit else "leyden"
    what = f"{type(error).__name__}: {str(error).strip()}".splitlines()[:4]
    return "\n".join([f"{who} failed with {what[0]}", *what[1:], f"at {place.removeprefix(os.getcwd() + '/')}",
                      "Put --debug at the end of the command for the traceback."])  # fmt: skip
