"""Callbacks that end a run in the middle, or take a rank's disk away."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.full_disk import is_waited_for


class Ends(Callback):
    """Does something at the start of a step.

    Args:
        step: Optimizer steps that are done by then.
        how: An exception on each rank, SIGTERM to rank 1, or no room for files above 4 kB on rank 1, until it
            waits for that, or for good: it gets Ctrl-C in the wait.
    """

    def __init__(self, step: int, how: Literal["exception", "sigterm", "full", "full for good"]) -> None:
        self.step, self.how = step, how

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step != self.step:
            return
        if self.how == "exception":
            raise ArithmeticError("made by the test")
        if trainer.global_rank == 1 and self.how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.global_rank == 1:
            trainer.strategy.checkpoint_io.wait()  # the earlier one is to be whole
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            if self.how == "full":
                _once_it_waits(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))
            else:
                signal.signal(
                    signal.SIGINT, signal.default_int_handler
                )  # background jobs of a shell ignore it
                _once_it_waits(lambda: os.kill(os.getpid(), signal.SIGINT))


def _once_it_waits(act: Callable[[], None]) -> None:
    def watch() -> None:
        while not is_waited_for():
            time.sleep(0.02)
        act()

    threading.Thread(target=watch, daemon=True).start()
