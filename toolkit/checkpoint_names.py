"""How checkpoint files are named: `step-00000100.ckpt`."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ABANDONED", "step_named"]

ABANDONED = ".abandoned"
"""In the name of a checkpoint after a step that the run went back to: it is used only where there is no other."""

_NAMED = re.compile(
    rf"(?:.*[-_=])?step[-=]([0-9]{{1,18}})(?:{re.escape(ABANDONED)}(?:-[0-9]+)?)?\.ckpt", re.ASCII
)


def step_named(path: Path) -> int | None:
    """Returns the step in the name of a checkpoint, such as step-00000100.ckpt; None for other names."""
    found = _NAMED.fullmatch(path.name)
    return int(found[1]) if found else None
