"""Says at the end of a test run what a technique of the catalogue costs."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

BAR_SECONDS = 1.5
"""What one more technique may add to the time of the default tests."""


class Cost:
    """Adds up the tests of `test_catalogue.py` by technique, and says what one more costs.

    Args:
        workers: Processes that share the tests: a second of a test is a part of a second of the whole.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the time of a test, its setup and teardown."""
        file, _, name = report.nodeid.partition("::")
        if file.endswith("test_catalogue.py") and name.startswith("test_promise["):
            self.seconds[name.partition("[")[2].partition("-")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the mean, the median and the dearest."""
        if not self.seconds:
            return
        share = {name: seconds / self.workers for name, seconds in self.seconds.items()}
        dearest = ", ".join(f"{name} {share[name]:.1f} s" for name, _ in self.seconds.most_common(3))
        terminalreporter.write_line(
            f"The kit on {len(share)} techniques: one more costs {sum(share.values()) / len(share):.1f} s "
            f"(median {median(share.values()):.1f} s, bar {BAR_SECONDS} s in the default tests; most: {dearest})."
        )
