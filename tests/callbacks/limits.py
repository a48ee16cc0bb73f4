"""Callbacks for tests of what happens out of memory."""

from __future__ import annotations

import resource
from typing import Any

from lightning.pytorch import Callback

from core import memory_limits


class Less(Callback):
    """Gives one rank less memory than the others while a search goes on.

    Args:
        rank: Which.
        limit: Bytes beyond what it has.
    """

    def __init__(self, rank: int, limit: int) -> None:
        self.rank, self.limit = rank, limit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the limit."""
        self.before = resource.getrlimit(resource.RLIMIT_DATA)
        if trainer.global_rank == self.rank:
            most = memory_limits.held_bytes() + self.limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, self.before[1]))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes it away."""
        resource.setrlimit(resource.RLIMIT_DATA, self.before)
