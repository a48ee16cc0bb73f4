"""Chrome traces that torch.profiler wrote: time of operators, and time in which nothing ran."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES, open_inside, parse_json, read_error
from toolkit.intervals import length, union

__all__ = ["EVERYWHERE", "STEPS", "Operator", "Trace", "as_text", "read_trace", "table"]

STEPS = "optimizer_steps"
"""Key of a trace: how many optimizer steps were profiled."""

ON_CPU, ON_GPU = ("cpu_op",), ("kernel", "gpu_memcpy", "gpu_memset")
EVERYWHERE = "anywhere"
MOST_NAME, MOST_GAPS = 80, 3


class Operator(NamedTuple):
    """What an operator or kernel took in a step.

    Attributes:
        calls: How often it was called.
        self_ms: Milliseconds, without those of operators that it called.
    """

    calls: float
    self_ms: float


class Gap(NamedTuple):
    """A time in which nothing ran on a thread or stream.

    Attributes:
        ms: Milliseconds.
        before: What ended before it, the outermost operator.
        after: What began after it, likewise.
    """

    ms: float
    before: str
    after: str


@dataclass
class Trace:
    """A trace.

    Attributes:
        steps: Optimizer steps.
        lanes: Thread or stream -> (name, begin, end) of what ran on it, in microseconds.
    """

    steps: int
    lanes: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)

    def operators(self) -> dict[str, Operator]:
        """Returns what each operator took in the mean step."""
        calls: dict[str, int] = {}
        own: dict[str, float] = {}
        for events in self.lanes.values():
            inside: list[tuple[str, float]] = []  # the operators that the next one may be in: name, end
            for name, begin, end in sorted(events, key=lambda event: (event[1], -event[2])):
                while inside and inside[-1][1] <= begin:
                    inside.pop()
                if inside:
                    own[inside[-1][0]] -= min(end, inside[-1][1]) - begin
                calls[name] = calls.get(name, 0) + 1
                own[name] = own.get(name, 0.0) + end - begin
                inside.append((name, end))
        return {
            name: Operator(count / self.steps, own[name] / 1e3 / self.steps) for name, count in calls.items()
        }

    def idle(self) -> dict[str, float]:
        """Returns the share of the time in which nothing ran: on each thread and stream, and anywhere at all."""
        busy = {lane: union([span for _, *span in events]) for lane, events in self.lanes.items()}  # type: ignore[misc]
        everything = union([span for spans in busy.values() for span in spans])
        if not everything:
            return {}
        whole = everything[-1][1] - everything[0][0]
        return {lane: 1 - length(spans) / whole for lane, spans in {**busy, EVERYWHERE: everything}.items()}

    def gaps(self, most: int = MOST_GAPS) -> dict[str, list[Gap]]:
        """Returns the longest times in which nothing ran on each thread and stream, the longest first."""
        found: dict[str, list[Gap]] = {}
        for lane, events in self.lanes.items():
            gaps = []
            last, busy_until = "", float("inf")
            for name, begin, end in sorted(events, key=lambda event: (event[1], -event[2])):
                if begin > busy_until:
                    gaps.append(Gap((begin - busy_until) / 1e3, last, name))
                if not last or end > busy_until:
                    last, busy_until = name, end
            if gaps:
                found[lane] = sorted(gaps, key=lambda gap: -gap.ms)[:most]
        return found


def read_trace(path: Path) -> Trace:
    """Reads a trace, .json or .json.gz.

    Raises:
        ConfigError: If it cannot be read, or is no trace of torch.profiler.
    """
    try:
        with open_inside(path.parent, path.name) as stream:
            content = stream.read(MOST_BYTES + 1)
        if content[:2] == b"\x1f\x8b":
            unpacked = zlib.decompressobj(zlib.MAX_WBITS | 16)
            content = unpacked.decompress(content, MOST_BYTES + 1)
            if not unpacked.eof and len(content) <= MOST_BYTES:
                raise ValueError("it is cut off")
        document = parse_json(content, unique=False)
        return _trace(document)
    except (OSError, ValueError, zlib.error, KeyError, TypeError, AttributeError) as error:
        reason = (
            read_error(error)
            if isinstance(error, OSError | ValueError)
            else f"{type(error).__name__}: {error}"
        )
        raise ConfigError(
            f"{path} is no trace that can be read: {reason}.\nThe callback Profile writes profile_step_N.rank0.json.gz into the "
            "run folder."
        ) from error


def _trace(document: dict[str, Any]) -> Trace:
    found: dict[tuple[bool, int, int], list[tuple[str, float, float]]] = {}
    for event in document["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") == "X" and kind in (*ON_CPU, *ON_GPU):
            begin = float(event["ts"])
            key = kind in ON_GPU, int(event["pid"]), int(event["tid"])
            found.setdefault(key, []).append((_printable(event["name"]), begin, begin + float(event["dur"])))
    trace = Trace(max(1, int(document.get(STEPS, 1))))
    threads = 0
    # numbers of threads differ from run to run: by how much they did
    for (on_gpu, process, lane), events in sorted(found.items(), key=lambda item: -len(item[1])):
        name = f"GPU {process}, stream {lane}" if on_gpu else f"CPU, thread {threads}"
        threads += not on_gpu
        trace.lanes[name] = events
    return trace


def _printable(name: Any) -> str:
    return name if isinstance(name, str) and name.isprintable() else ascii(name)


def table(trace: Trace, rows: int = 30) -> list[tuple[str, ...]]:
    """Returns the operators that took longest, as rows of text with a header."""
    operators = sorted(trace.operators().items(), key=lambda item: -item[1].self_ms)
    total = sum(operator.self_ms for _, operator in operators) or 1.0
    found: list[tuple[str, ...]] = [("ms a step", "share", "calls a step", "operator")]
    for name, (calls, self_ms) in operators[:rows]:
        found.append((f"{self_ms:,.3f}", f"{self_ms / total:.1%}", f"{calls:,.1f}", name[:MOST_NAME]))
    return found


def as_text(trace: Trace) -> str:
    """Returns the table of operators, the idle shares and the longest gaps, for people."""
    idle = [("idle", "where"), *((f"{share:.1%}", lane) for lane, share in trace.idle().items())]
    gaps = [("idle ms", "where", "after", "before")]
    for lane, found in trace.gaps().items():
        gaps += [(f"{ms:,.3f}", lane, before[:MOST_NAME], after[:MOST_NAME]) for ms, before, after in found]
    return f"{_columns(table(trace))}\n\n{_columns(idle)}\n\n{_columns(gaps)}\n"


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([*(f"{cell:>{width}}" for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    )
    return "\n".join(lines)
