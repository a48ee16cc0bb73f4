"""What a run logged, by figure and step: the evidence of a diagnosis."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import ConfigError
from toolkit.bounded import MOST_TABLE_BYTES

MOST_POINTS = 4000
"""When a figure has as many points, every second one of its first half is dropped."""


class Series(NamedTuple):
    """A figure over steps.

    Attributes:
        steps: Optimizer steps, rising, (n,).
        values: The figure, (n,); infinite and NaN as they were logged.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def up_to(self, step: float) -> Series:
        """Returns the part up to a step, included."""
        count = int(np.searchsorted(self.steps, step, side="right"))
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: float) -> Series:
        """Returns the part from a step on."""
        begin = int(np.searchsorted(self.steps, step, side="left"))
        return Series(self.steps[begin:], self.values[begin:])

    def first_step(self, chosen: np.ndarray) -> int:
        """Returns the first step of those that are chosen, (n,) booleans; at least one is."""
        return int(self.steps[int(np.argmax(chosen))])


class History:
    """Figures by name, each with the steps in which it was logged."""

    def __init__(self) -> None:
        self._figures: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds the figures of a step; a step that is not behind the last one replaces what came after it."""
        for name, value in figures.items():
            steps, values = self._figures.setdefault(name, ([], []))
            while steps and steps[-1] >= step:
                steps.pop()
                values.pop()
            steps.append(step)
            values.append(float(value))
            if len(steps) >= MOST_POINTS:
                del steps[: MOST_POINTS // 2 : 2], values[: MOST_POINTS // 2 : 2]

    def series(self, name: str) -> Series:
        """Returns a figure over steps; empty if it was not logged."""
        steps, values = self._figures.get(name, ([], []))
        return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))

    def names(self, start: str = "") -> list[str]:
        """Returns the names of figures that begin with a text."""
        return [name for name in self._figures if name.startswith(start)]

    @property
    def last_step(self) -> int:
        """The last step with any figure; 0 before there is one."""
        return max((steps[-1] for steps, _ in self._figures.values() if steps), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Returns steps and values of each figure, but those of clocks: they are another run's after a resume."""
        return {
            name: {"steps": [*steps], "values": [*values]}
            for name, (steps, values) in self._figures.items()
            if not name.startswith("time/")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a saved history."""
        self._figures = {name: ([*kept["steps"]], [*kept["values"]]) for name, kept in state.items()}


def read_history(path: Path) -> History:
    """Returns what `MetricsCSV` wrote.

    Raises:
        ConfigError: If there is no such file, or it is not as MetricsCSV writes it.
    """
    try:
        if path.exists() and not path.is_file():  # such as a pipe, which would be waited for
            raise ConfigError(f"{path} is not as MetricsCSV writes it: it is no regular file.")
        if path.stat().st_size > MOST_TABLE_BYTES:
            raise ConfigError(
                f"{path} has more than {MOST_TABLE_BYTES:,} bytes: it is not as MetricsCSV writes it."
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}: add the logger MetricsCSV to the run (trainer.logger)."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not as MetricsCSV writes it: {error}.") from error
    history = History()
    try:
        for row in csv.DictReader(
            text[: text.rfind("\n") + 1].split("\n")
        ):  # a killed run may end in mid-line
            step = int(row.pop("step"))
            history.add(step, {name: float(value) for name, value in row.items() if value})
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} is not as MetricsCSV writes it: {error}.") from None
    return history
