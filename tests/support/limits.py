"""Callbacks for tests of what happens out of memory."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

from lightning.pytorch import Callback

from toolkit import memory_limits

M_MMAP_THRESHOLD = -3
"""Of mallopt: from so many bytes on an allocation is mapped, and unmapped when it is given up."""


class Counted(Callback):
    """Maps tensors each by itself: room in the heap, which other tests of this process have left, would not count."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)


class Less(Counted):
    """Gives one rank less memory than the others while a search goes on.

    Args:
        rank: Which.
        limit: Bytes beyond what it has.
    """

    def __init__(self, rank: int, limit: int) -> None:
        super().__init__()
        self.rank, self.limit = rank, limit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the limit."""
        self.before = resource.getrlimit(resource.RLIMIT_DATA)
        if trainer.global_rank == self.rank:
            most = memory_limits.ceiling(self.limit)
            resource.setrlimit(resource.RLIMIT_DATA, (most, self.before[1]))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes it away."""
        resource.setrlimit(resource.RLIMIT_DATA, self.before)


class Squeeze(Counted):
    """Lets a rank run out of memory in the middle of a run.

    Args:
        limit: Bytes that it may have from then on beyond those that it holds.
        step: Optimizer steps before that.
        batch: Which micro-batch of the step.
        rank: Which rank.
    """

    def __init__(self, limit: int, step: int, batch: int = 0, rank: int = 0) -> None:
        super().__init__()
        self.limit, self.at = limit, (step, batch, rank)
        self.before = resource.getrlimit(resource.RLIMIT_DATA)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sets the limit."""
        if self.at == (trainer.global_step, batch_idx % trainer.accumulate_grad_batches, trainer.global_rank):
            most = memory_limits.ceiling(self.limit)
            resource.setrlimit(resource.RLIMIT_DATA, (most, self.before[1]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes it away."""
        resource.setrlimit(resource.RLIMIT_DATA, self.before)
