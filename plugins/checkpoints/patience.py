"""Waits while the disk is too full for a checkpoint, which stays in memory, and tries again."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a used-up quota, a file size limit: the user can fix these while the run waits."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


def no_room(error: BaseException | None) -> bool:
    """Returns whether a write failed because there was no space, found in the chain of causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


class Patience:
    """Waits between attempts to write a checkpoint, longer each time, until it is stopped.

    Attributes:
        waiting: Whether the last attempt failed.
        ending: Is set once the run is to end, also by a signal during `stopped_by_signals`: uploads then wait no longer.
    """

    def __init__(self) -> None:
        self.waiting = False
        self.ending = threading.Event()
        self._stopped = threading.Event()
        self._pause_s = FIRST_WAIT_S

    def wait(self, failure: ConfigError, quiet: bool = False) -> None:
        """Waits before the next attempt.

        Args:
            failure: The error of the last attempt.
            quiet: Whether to print nothing, because another rank does.

        Raises:
            ConfigError: `failure`, if the wait is stopped, also by SIGTERM in the main thread.
            KeyboardInterrupt: On Ctrl-C in the main thread.
        """
        if not quiet and not self.waiting:
            print(
                f"{str(failure).splitlines()[0]}\nThe run waits, and keeps it in memory: make room on the disk, and it "
                "continues by itself. Other ranks wait until their\ntimeout (30 minutes by default). Ctrl-C or SIGTERM "
                "ends the run without this checkpoint.",
                file=sys.stderr,
                flush=True,
            )
        self.waiting = True
        with self.stopped_by_signals():
            stopped = self._stopped.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_WAIT_S)
        if stopped:
            raise failure

    def over(self, quiet: bool = False) -> None:
        """Prints that the checkpoint has been written, if it had to wait."""
        if self.waiting and not quiet:
            print("There is room again: the checkpoint is written.", file=sys.stderr, flush=True)
        self.waiting, self._pause_s = False, FIRST_WAIT_S

    def stop(self) -> None:
        """Ends the wait, from any thread."""
        self._stopped.set()
        self.ending.set()

    def renew(self) -> None:
        """Resets the state for the next run."""
        self._stopped.clear()
        self.ending.clear()

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Lets Ctrl-C and SIGTERM end the wait, in the main thread, and raises them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        received: list[int] = []

        def note(number: int, frame: Any) -> None:
            received.append(number)
            self.ending.set()
            if self.waiting:
                self._stopped.set()

        # Signals that are ignored stay ignored, as SIGINT in background jobs of a shell.
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            for caught in received:
                signal.raise_signal(caught)
