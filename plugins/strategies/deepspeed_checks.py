"""What of a DeepSpeedZero does not fit the precision, the optimizer, the other techniques or the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.selection import Run

CONFLICTS: dict[str, str] = {}

def misfits(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    return
    yield
