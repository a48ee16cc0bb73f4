"""Update-to-weight ratios of blocks as a run recorded them, and which block left its band first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from toolkit.diagnosis import read_history

__all__ = ["Departure", "RecordsUpdates", "UpdateHistory", "departures", "with_table"]

KEPT = 256
"""Steps that a history holds."""

LEAST, WINDOW = 8, 32
"""Figures that a band follows from: at least, and at most."""

RETURNED = 3
"""So many figures inside, one after the other, are a return."""

DEVIATIONS, LEAST_FACTOR = 6.0, 1.5
"""Half the width of a band: so many standard deviations of the logarithm, at least this factor."""


class UpdateHistory:
    """Update over weight of each block, for the last steps that were recorded.

    Args:
        blocks: Their names.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        self.blocks = list(blocks)
        self._steps = np.zeros(KEPT, dtype=np.int64)
        self._ratios = np.full((KEPT, len(self.blocks)), np.nan)
        self._count = 0

    def add(self, step: int, ratios: Sequence[float]) -> None:
        """Adds the ratios of a step; those of this step and of later ones are replaced: training went back.

        Args:
            step: The optimizer step.
            ratios: (blocks,); NaN: not recorded.
        """
        self._count = int(np.searchsorted(self.steps, step))
        if self._count == KEPT:
            half = self._count = KEPT // 2
            for rows in (self._steps, self._ratios):
                rows[:half] = rows[half:].copy()
        self._steps[self._count], self._ratios[self._count] = step, ratios
        self._count += 1

    @property
    def steps(self) -> np.ndarray:
        """The steps that were recorded, (n,), rising."""
        return self._steps[: self._count]

    @property
    def ratios(self) -> np.ndarray:
        """Their ratios, (n, blocks)."""
        return self._ratios[: self._count]


@runtime_checkable
class RecordsUpdates(Protocol):
    """A callback that records update-to-weight ratios.

    Attributes:
        update_history: Of the run so far, the same on every rank; None before training.
    """

    update_history: UpdateHistory | None


def with_table(history: UpdateHistory, path: Path) -> UpdateHistory:
    """Returns a short history with what comes before it in the `metrics.csv` of the run, which may have been resumed.

    Raises:
        ConfigError: If there is a table, and it is not as MetricsCSV writes it.
    """
    if len(history.steps) > WINDOW or not path.is_file():
        return history
    table, whole = read_history(path), UpdateHistory(history.blocks)
    series = [table.series(f"update_ratio/{block}") for block in history.blocks]
    first = history.steps[0] if len(history.steps) else np.inf
    earlier = sorted({int(step) for one in series for step in one.steps if step < first})[-WINDOW:]
    for step in earlier:
        at = [one.values[one.steps == step] for one in series]
        whole.add(step, [float(values[0]) if len(values) else np.nan for values in at])
    for step, ratios in zip(history.steps, history.ratios, strict=True):
        whole.add(int(step), ratios.tolist())
    return whole


class Departure(NamedTuple):
    """When a block's ratio left its band, to which it has not come back.

    Attributes:
        block: Its name.
        step: The first step outside.
        ratio: Update over weight there.
        low: Lower end of the band.
        high: Upper end of the band.
    """

    block: str
    step: int
    ratio: float
    low: float
    high: float


def departures(history: UpdateHistory, step: int) -> list[Departure] | None:
    """Returns the blocks that have left their band by a step and not come back for 3 figures, the first to leave it first.

    The band is of the logarithm: its median over the last 32 ratios that were inside, and 6 standard deviations, estimated
    from the median deviation, in both directions. So a learning rate that changes slowly moves the band, and one that jumps is
    inside again after 32 figures.

    Args:
        history: What was recorded.
        step: Later figures do not count.

    Returns:
        The departures; None if there are fewer than 9 figures up to the step.
    """
    count = int(np.searchsorted(history.steps, step, side="right"))
    if count <= LEAST:
        return None
    found = []
    for index, block in enumerate(history.blocks):
        left = _left(history.ratios[:count, index])
        if left is not None:
            place, low, high = left
            ratio = float(history.ratios[place, index])
            found.append(Departure(block, int(history.steps[place]), ratio, low, high))
    with np.errstate(divide="ignore"):
        return sorted(
            found, key=lambda one: (one.step, -abs(np.log(one.ratio / np.sqrt(one.low * one.high))))
        )


def _left(ratios: np.ndarray) -> tuple[int, float, float] | None:
    """Returns where the ratios begin that are outside of the band and have not come back, and the band; None: there are none."""
    inside: list[float] = []
    outside: list[tuple[int, float, float]] = []
    returned = 0
    with np.errstate(divide="ignore"):
        logarithms = np.log(ratios)
    for place, value in enumerate(logarithms):
        if np.isnan(value):  # not recorded
            continue
        low, high = _band(inside)
        if low <= value <= high:
            returned += 1
            outside = outside if returned < RETURNED else []
        else:
            returned = 0
            outside.append((place, float(np.exp(low)), float(np.exp(high))))
            if len(outside) < WINDOW:
                continue
            inside = [float(one) for one in logarithms[place - WINDOW + 1 : place] if np.isfinite(one)]
            outside = []
        if np.isfinite(value):
            inside.append(float(value))
    return outside[0] if outside else None


def _band(inside: Sequence[float]) -> tuple[float, float]:
    if len(inside) < LEAST:
        return -np.inf, np.inf
    last = np.array(inside[-WINDOW:])
    middle = float(np.median(last))
    width = max(DEVIATIONS * 1.4826 * float(np.median(np.abs(last - middle))), float(np.log(LEAST_FACTOR)))
    return middle - width, middle + width
