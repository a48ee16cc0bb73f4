"""Times of the phases of optimizer steps, on a GPU without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

__all__ = ["Phase", "PhaseClock", "common", "length", "seconds_between", "union"]

Interval = tuple[float, float]
Phase = tuple[str, float, float]


class PhaseClock:
    """Notes when phases of optimizer steps end.

    On CUDA a moment is an event in the current stream: it says when the device comes to this point. Steps are read once the
    device has gone through them, so that the host never waits. On other devices it is the host's clock.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[tuple[str, Any]] = []
        self._closed: deque[list[tuple[str, Any]]] = deque()

    def now(self) -> Any:
        """Returns this moment, for `seconds_between`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Begins a step now, and forgets what was not read."""
        self._open = [("", self.now())]
        self._closed.clear()

    def mark(self, phase: str) -> None:
        """Notes that the time since the last mark belongs to a phase."""
        self._open.append((phase, self.now()))

    def end_step(self) -> Any:
        """Ends the step with the last mark, from which on the next one counts; returns the moment in which it began."""
        self._closed.append(self._open)
        began = self._open[0][1]
        self._open = [("", self._open[-1][1])]
        return began

    def read(self) -> list[list[Phase]]:
        """Returns the steps that the device has finished since the last call: (phase, begin, end), in seconds of the step."""
        found = []
        while self._closed and (not self._cuda or self._closed[0][-1][1].query()):
            marks = self._closed.popleft()
            ends = [seconds_between(marks[0][1], moment) for _, moment in marks]
            found.append([(marks[i][0], ends[i - 1], ends[i]) for i in range(1, len(marks))])
        return found


def seconds_between(earlier: Any, later: Any) -> float:
    """Returns the seconds between two moments of a `PhaseClock`; events have to be complete."""
    if isinstance(earlier, float):
        return float(later - earlier)
    return float(earlier.elapsed_time(later)) / 1e3


def union(intervals: list[Interval]) -> list[Interval]:
    """Returns the same points as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Returns the points that are in both of two lists, each as `union` returns it."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    """Returns the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)
