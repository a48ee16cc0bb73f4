"""A command that goes on until it is ended, such as a server, in a forked process that has imported everything."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from conformance import runs
from conformance.workshop import workshop


class Started:
    """A command of `python -m core`, started.

    Args:
        words: The command and its arguments.
        folder: Where it runs.

    Attributes:
        process: The process.
        said: What it has written to stderr, as far as it was read.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._output = Path(tempfile.mkdtemp(dir=workshop())) / "started"
        self.process = runs.start(words, folder, self._output)
        self.said = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Waits until it writes what the pattern finds."""
        while True:
            alive = self.process.is_alive()
            if found := re.search(pattern, self._read()):
                return found
            assert alive, self.said
            time.sleep(0.02)

    def end(self, with_signal: int = signal.SIGTERM) -> int | None:
        """Sends a signal; returns the exit code, or None where it has not ended after a minute."""
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.process.pid, with_signal)
        self.process.join(60)
        self._read()
        code: int | None = self.process.exitcode
        return code

    def _read(self) -> str:
        self.said = Path(f"{self._output}.err").read_text(encoding="utf-8", errors="replace")
        return self.said
