"""Says at the end of a test run what a technique of the catalogue costs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import median

import pytest

from conformance import runs

BAR_SECONDS = 1.5
"""What one more technique may add to the time of the default tests, on two cores."""

CORES = 2
NOTE = "cpu_seconds"


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, its children and its fork server's runs.

    Unlike time, they are the same whatever else the machine does.
    """
    used = [getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_of_process, _children()))


def _children() -> list[str]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text().split() if path.exists() else []


def _of_process(number: str) -> float:
    """Returns the CPU seconds of a living process and of those that it waited for; 0 if it has just ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@cache
def _start_fork_server() -> None:
    """Waits for its imports, which are not the first technique's."""
    runs.in_subprocess(len, ())


class Measured:
    """Notes the CPU seconds of each test of `test_catalogue.py`, without those of the fork server's imports."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measures the test alone: fixtures, and the fork server's start, belong to all of them."""
        if not item.name.startswith("test_promise[") or item.path.name != "test_catalogue.py":
            return (yield)
        if item.callspec.params["proof"].runs:  # type: ignore[attr-defined]
            _start_fork_server()
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((NOTE, cpu_seconds() - before))


class Cost:
    """Adds up the tests of `test_catalogue.py` by technique, and says what one more costs."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the CPU seconds of a test."""
        file, _, name = report.nodeid.partition("::")
        if report.when == "call" and file.endswith("test_catalogue.py") and name.startswith("test_promise["):
            technique = name.partition("[")[2].partition("-")[0]
            self.seconds[technique] += dict(report.user_properties).get(NOTE, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the mean, the median and the dearest."""
        if not self.seconds:
            return
        share = {name: seconds / CORES for name, seconds in self.seconds.items()}
        dearest = ", ".join(f"{name} {share[name]:.1f} s" for name, _ in self.seconds.most_common(3))
        terminalreporter.write_line(
            f"The kit on {len(share)} techniques, on {CORES} cores of one's own: one more costs "
            f"{sum(share.values()) / len(share):.1f} s (median {median(share.values()):.1f} s, bar {BAR_SECONDS} s "
            f"in the default tests; most: {dearest})."
        )
