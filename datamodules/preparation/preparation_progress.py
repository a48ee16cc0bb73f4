"""Shows the progress of a preparation: a bar on a terminal, lines at intervals in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from toolkit.sizes import readable

_LINE_EVERY_S = 30.0


def watched(records: Iterator[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    """Yields the records of finished tasks, and shows progress and speed on stderr.

    Tasks that an earlier run finished count as done, but not for the speed.

    Args:
        records: Records of the tasks, as they finish.
        number: Number of tasks.
    """
    speed, shown, tenth = _Speed(number), time.monotonic(), 0
    screen = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    with bar:
        line = bar.add_task("Tokenising", total=number, speed="")
        for record in records:
            speed.add(record)
            bar.update(line, advance=1, description=f"tasks {speed.done:,}/{number:,}", speed=str(speed))
            now, part = time.monotonic(), 10 * speed.done // number
            if not screen.is_terminal and (now - shown > _LINE_EVERY_S or part > tenth):
                print(f"tasks {speed.done:,}/{number:,}: {speed}", file=sys.stderr, flush=True)
                shown, tenth = now, part
            yield record


class _Speed:
    """Documents, megabytes and tokens per second, and the time left."""

    def __init__(self, number: int) -> None:
        self.number, self.done, self.fresh = number, 0, 0
        self.documents = self.tokens = self.bytes = 0
        self.since = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        self.done += 1
        if record.get("found"):
            return
        self.fresh += 1
        self.documents += sum(counts["documents"] for counts in record["splits"].values())
        self.tokens += sum(counts["tokens"] for counts in record["splits"].values())
        self.bytes += sum(counts["bytes"] for counts in record["sources"].values())

    def __str__(self) -> str:
        if not self.fresh:
            return "done by an earlier run"
        seconds = max(time.monotonic() - self.since, 1e-9)
        left = timedelta(seconds=round(seconds / self.fresh * (self.number - self.done)))
        return (
            f"{self.documents / seconds:,.0f} documents/s  {readable(self.bytes / seconds)}/s  "
            f"{self.tokens / seconds:,.0f} tokens/s  {left} left"
        )
