"""A launcher's signal in the middle of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class Terminate(Callback):
    """Sends SIGTERM to one rank in one of its forward passes, be it a training's or a trial's.

    Args:
        rank: Which.
        forward: Which pass, from 0 on.
    """

    def __init__(self, rank: int, forward: int) -> None:
        self.rank, self.left = rank, forward

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watches the passes of that rank."""
        if trainer.global_rank == self.rank:
            pl_module.network.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        self.left -= 1
