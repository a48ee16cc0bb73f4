"""Times of the phases of optimizer steps, on a GPU without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

__all__ = ["Phase", "PhaseClock", "is_over", "seconds_between"]

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
        while self._closed and is_over(self._closed[0][-1][1]):
            marks = self._closed.popleft()
            ends = [seconds_between(marks[0][1], moment) for _, moment in marks]
            found.append([(marks[i][0], ends[i - 1], ends[i]) for i in range(1, len(marks))])
        return found


def is_over(moment: Any) -> bool:
    """Returns whether there is a moment, and the device has come to it."""
    return moment is not None and (isinstance(moment, float) or bool(moment.query()))


def seconds_between(earlier: Any, later: Any) -> float:
    """Returns the seconds between two moments of a `PhaseClock`; events have to be complete."""
    if isinstance(earlier, float):
        return float(later - earlier)
    return float(earlier.elapsed_time(later)) / 1e3
