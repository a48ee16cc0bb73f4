"""One thread that writes checkpoints, one at a time, while training continues."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from core.errors import ConfigError
from plugins.checkpoints.patience import Patience


class Background:
    """Runs one task after the other in a thread of its own, which starts with the first.

    Attributes:
        patience: Waits for space on the disk, in the thread.
    """

    def __init__(self) -> None:
        self.patience = Patience()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def submit(self, task: Callable[..., None], *arguments: Any) -> None:
        """Starts a task, whose error `wait` raises; the one before has to be waited for."""
        self._pending = self._executor().submit(task, *arguments)

    def submit_aside(self, task: Callable[..., None], *arguments: Any) -> None:
        """Starts a task after those before it; its error is printed, and changes nothing for the run."""

        def run() -> None:
            try:
                task(*arguments)
            except Exception as error:
                print(error, file=sys.stderr, flush=True)

        self._executor().submit(run)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint", _set_device, (_device(),))
        return self._thread

    def wait(self) -> None:
        """Waits for the task, if any, and raises its error."""
        pending = self._pending
        if pending is None:
            return
        try:
            with self.patience.stopped_by_signals():
                pending.result()
        finally:
            if pending.done():
                self._pending = None

    def close(self) -> None:
        """Waits at the end of the run, also after an error, and ends the thread."""
        failed = sys.exc_info()[1] is not None
        if failed:
            self.patience.stop()
        try:
            self.wait()
        except ConfigError as error:
            if not failed:
                raise
            print(error, file=sys.stderr)  # the run ends with another error
        finally:
            if self._thread is not None:
                with self.patience.stopped_by_signals():
                    self._thread.shutdown()
                self._thread = None
        self.patience.renew()


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _set_device(device: int | None) -> None:
    """Gives a thread the device of this rank: torch copies without waiting, and then synchronises the thread's device."""
    if device is not None:
        torch.cuda.set_device(device)
