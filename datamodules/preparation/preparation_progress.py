"""Shows the progress of a preparation: a bar on a terminal, lines at intervals in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from toolkit.sizes import readable

_LINE_EVERY_S = 30.0


def watched(
    records: Iterator[dict[str, Any]], number: int, sizes: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the records of finished tasks, and shows progress and speed on stderr.

    Progress is the share of the source's bytes in finished tasks, because tasks differ in size. Tasks that an earlier run
    finished count as done, but not for the speed.

    Args:
        records: Records of the tasks, as they finish, each with its `number`.
        number: Number of tasks.
        sizes: Bytes of the source's files in each task; None, or zeros: not known, and tasks are counted.
    """
    speed, shown, tenth = _Speed(number, sizes), time.monotonic(), 0
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
        line = bar.add_task("Tokenising", total=1.0, speed="")
        for record in records:
            speed.add(record)
            bar.update(line, completed=speed.share, description=speed.place, speed=str(speed))
            now, part = time.monotonic(), int(10 * speed.share)
            if not screen.is_terminal and (now - shown > _LINE_EVERY_S or part > tenth):
                print(f"{speed.place}: {speed}", file=sys.stderr, flush=True)
                shown, tenth = now, part
            yield record


class _Speed:
    """What is done of the source, documents, megabytes and tokens per second, and the time left."""

    def __init__(self, number: int, sizes: Sequence[int] | None = None) -> None:
        self.known = sizes is not None and sum(sizes) > 0
        self.sizes = sizes if sizes is not None and self.known else [1] * number
        self.number, self.total = number, sum(self.sizes)
        self.tasks = self.fresh_tasks = 0
        self.done = self.fresh = 0.0  # in bytes
        self.documents = self.tokens = self.bytes = 0
        self.since = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        size = self.sizes[record["number"]] if "number" in record else self.total / self.number
        self.tasks += 1
        self.done += size
        if record.get("found"):
            return
        self.fresh_tasks += 1
        self.fresh += size
        self.documents += sum(counts["documents"] for counts in record["splits"].values())
        self.tokens += sum(counts["tokens"] for counts in record["splits"].values())
        self.bytes += sum(counts["bytes"] for counts in record["sources"].values())

    @property
    def share(self) -> float:
        """What is done of the source, 0 to 1."""
        return self.done / self.total

    @property
    def place(self) -> str:
        """What is done of the source, for people."""
        tasks = f"tasks {self.tasks:,}/{self.number:,}"
        return f"{tasks}, {readable(self.done)} of {readable(self.total)}" if self.known else tasks

    def __str__(self) -> str:
        if not self.fresh_tasks:
            return "done by an earlier run"
        seconds = max(time.monotonic() - self.since, 1e-9)
        left = (
            timedelta(seconds=round(seconds * (self.total - self.done) / self.fresh)) if self.fresh else "?"
        )
        return (
            f"{self.documents / seconds:,.0f} documents/s  {readable(self.bytes / seconds)}/s  "
            f"{self.tokens / seconds:,.0f} tokens/s  {left} left"
        )
