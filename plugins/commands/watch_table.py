"""The figures of a run as `watch` reads them: what was appended to a metrics.csv since the last look."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import IO, Any

import numpy as np

from plugins.commands.compare import seconds_at

MOST_BYTES = 1 << 28
"""Limit of a file; what is beyond is not shown."""

PIECE_BYTES = 1 << 25
"""Limit of what is read in one look; the next ones read on."""

MOST_COLUMNS = 4096
MOST_HEADER_BYTES = 1 << 19

POINTS = 500
"""Limit of points of a curve: of a longer one, the lowest and the highest of each part are kept."""


class Table:
    """Rows of a metrics.csv, which MetricsCSV appends to, whose last row it replaces, and which it may write anew.

    Args:
        open_file: Opens the file for reading.

    Attributes:
        changes: Rises when there is something new.
        note: What is wrong with the file; empty: nothing.
    """

    def __init__(self, open_file: Callable[[], IO[bytes]]) -> None:
        self._open = open_file
        self.changes = 0
        self.note = ""
        self._begin(b"", [])

    def _begin(self, header: bytes, columns: list[str]) -> None:
        self._header, self._columns = header, columns
        self._steps = array("d")
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._offset = len(header)  # where the last row begins, which may still change
        self._before = b""  # the line before it
        self._last = b""

    def look(self) -> None:
        """Reads what is new.

        Raises:
            OSError: If the file is not there or cannot be read.
            ValueError: If it is no regular file inside of its folder.
        """
        with self._open() as stream:
            if not self._is_same(stream):
                stream.seek(0)
                header = stream.readline(MOST_HEADER_BYTES)
                if not header.endswith(b"\n"):
                    return
                columns = next(csv.reader([header.decode(errors="replace").rstrip("\n")]), [])
                if "step" not in columns or len(columns) > MOST_COLUMNS:
                    self.note = "metrics.csv is not as MetricsCSV writes it"
                    return
                self._begin(header, columns)
                self.changes += 1
            stream.seek(self._offset)
            more = os.fstat(stream.fileno()).st_size > MOST_BYTES
            self.note = f"only the first {MOST_BYTES >> 20} MiB of metrics.csv are shown" if more else ""
            self._take(stream.read(max(min(PIECE_BYTES, MOST_BYTES - self._offset), 0)))

    def _is_same(self, stream: IO[bytes]) -> bool:
        """Returns whether the file still begins with what was read of it."""
        if not self._header or os.fstat(stream.fileno()).st_size < self._offset:
            return False
        if stream.read(len(self._header)) != self._header:
            return False
        stream.seek(self._offset - len(self._before))
        return stream.read(len(self._before)) == self._before

    def _take(self, piece: bytes) -> None:
        lines = piece[: piece.rfind(b"\n") + 1].splitlines(keepends=True)
        while lines and not lines[-1].strip():  # of a row that became shorter
            lines.pop()
        if not lines or (len(lines) == 1 and lines[0] == self._last):
            return
        for line in lines[:-1]:
            self._add(line)
            self._offset += len(line)
            self._before = line
        self._last = lines[-1]
        self.changes += 1

    def _add(self, line: bytes) -> None:
        cells = self._cells(line)
        if cells is None:
            return
        row = len(self._steps)
        self._steps.append(cells.pop("step"))
        for name, value in cells.items():
            self._rows.setdefault(name, array("I")).append(row)
            self._values.setdefault(name, array("d")).append(value)

    def _cells(self, line: bytes) -> dict[str, float] | None:
        try:
            [texts] = csv.reader([line.decode().rstrip("\n")])
            found = {name: float(text) for name, text in zip(self._columns, texts, strict=True) if text}
        except (ValueError, csv.Error):  # not a row, or not of numbers
            return None
        return found if abs(found.get("step", np.inf)) < 2**53 else None

    # -- curves ---------------------------------------------------------------------------------------

    def newest(self) -> dict[str, float]:
        """Returns the newest value of each figure, and of `step`."""
        found = {name: values[-1] for name, values in self._values.items()}
        if self._steps:
            found["step"] = self._steps[-1]
        return found | (self._cells(self._last) or {})

    def names(self) -> list[str]:
        """Returns the names of all figures."""
        return sorted(name for name in self._columns if name != "step")

    def curve(self, name: str) -> dict[str, list[float | None]] | None:
        """Returns a figure over `step`, `tokens` and `time` (seconds), at most `POINTS` points; None where there is none."""
        steps, values = self._points(name)
        if not len(steps):
            return None
        kept = thinned(values)
        steps, values = steps[kept], values[kept]
        at, tokens, seconds = self._clock()
        return {
            "step": _plain(steps),
            "tokens": _plain(_at(steps, at, tokens)),
            "time": _plain(_at(steps, at, seconds)),
            "value": _plain(values),
        }

    def _points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a figure, (n,) each."""
        steps = np.frombuffer(self._steps)[np.frombuffer(self._rows.get(name, array("I")), np.uint32)]
        values = np.frombuffer(self._values.get(name, array("d")))
        last = self._cells(self._last) or {}
        if name in last:
            return np.append(steps, last["step"]), np.append(values, last[name])
        return steps, values

    def _clock(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns steps, and the tokens seen and seconds trained by then, (n,); NaN where that is not known."""
        at, tokens = self._points("train/tokens")
        times = dict(zip(*map(list, self._points("throughput/step_time_ms")), strict=True))
        each = np.array([times.get(step, np.nan) for step in at], dtype=float)
        return at, tokens, seconds_at(at, each)


def thinned(values: np.ndarray) -> np.ndarray:
    """Returns indices of at most `POINTS` values, (n,): all, or the lowest and highest of each part, and the last."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), POINTS // 2, dtype=int)
    known = np.where(np.isfinite(values), values, 0.0)
    parts = list(pairwise(edges))
    lowest = [begin + int(np.argmin(known[begin:end])) for begin, end in parts]
    highest = [begin + int(np.argmax(known[begin:end])) for begin, end in parts]
    return np.unique([0, *lowest, *highest, len(values) - 1])


def _at(steps: np.ndarray, at: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    if not len(at) or not np.isfinite(amounts).any():
        return np.full(len(steps), np.nan)
    return np.interp(steps, np.append(0.0, at), np.append(0.0, amounts))


def _plain(values: np.ndarray) -> list[float | None]:
    """Returns numbers as JSON has them, to 7 digits."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def group_of(name: str) -> str:
    """Returns under which heading a figure is shown: losses together, others by what their name begins with."""
    if name in ("train/loss", "val/loss") or name.startswith("loss/"):
        return "loss"
    return name.partition("/")[0] if "/" in name else "other"


def plain_number(value: Any) -> Any:
    """Returns a number as JSON has it, or None."""
    return value if isinstance(value, int | float) and np.isfinite(value) else None
