"""Callbacks for tests of what happens out of memory."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

import torch
from lightning.pytorch import Callback

from toolkit import memory_limits

M_MMAP_THRESHOLD = -3
"""Of mallopt: from so many bytes on an allocation is mapped, and unmapped when it is given up."""

M_TRIM_THRESHOLD = -1
"""Of mallopt: with so many free bytes at the heap's end they are given back."""

M_TOP_PAD = -2
"""Of mallopt: so many bytes more are added to the heap than an allocation needs."""


BYTES_PER_ROW = 10_000_000
"""What each row of a batch takes beside its activations: these need 0.6 to 4 MB a row, by the CPU's kernels."""


class _Activation(torch.autograd.Function):
    """The identity, which keeps memory for backward as an activation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row: int) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(len(x) * row, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Counted(Callback):
    """Makes each row need 10 MB, mapped: room in the heap, which earlier tensors have left, would not count.

    Args:
        row: Bytes in place of 10 MB, where the first step takes many by itself.
        pieces: In how many they are kept, as activations of layers.
    """

    def __init__(self, row: int = BYTES_PER_ROW, pieces: int = 1) -> None:
        self.row, self.pieces = row, pieces
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Adds what each row needs, where there is a backward."""

        def keep(network: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> Any:
            for _ in range(self.pieces if logits.requires_grad else 0):
                logits = _Activation.apply(logits, self.row // self.pieces)
            return logits

        pl_module.network.register_forward_hook(keep)


class Less(Counted):
    """Gives one rank less memory than the others while a search goes on.

    Args:
        rank: Which.
        limit: Bytes beyond what it has.
        row: Bytes that a row needs.
    """

    def __init__(self, rank: int, limit: int, row: int = BYTES_PER_ROW) -> None:
        super().__init__(row)
        self.rank, self.limit = rank, limit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the limit."""
        super().on_fit_start(trainer, pl_module)
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
        pieces: In how many what a row needs is kept.
    """

    def __init__(self, limit: int, step: int, batch: int = 0, rank: int = 0, pieces: int = 1) -> None:
        super().__init__(pieces=pieces)
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


class HalfState(Callback):
    """Memory runs out while the optimizer makes the state of a weight that had no gradient in the first steps.

    So it is with an expert that none of the first tokens chose.

    Args:
        step: In which optimizer step, from 1.
    """

    def __init__(self, step: int) -> None:
        self.step, self.steps = step, 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes the last weight's gradient away until that step, in which the second tensor of its state does not fit."""

        def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.steps += 1
            if self.steps < self.step:
                optimizer.param_groups[-1]["params"][-1].grad = None
            elif self.steps == self.step:
                torch.zeros_like = first

        def first(*args: Any, **kwargs: Any) -> torch.Tensor:
            torch.zeros_like = second
            return zeros_like(*args, **kwargs)

        def second(*args: Any, **kwargs: Any) -> torch.Tensor:
            torch.zeros_like = zeros_like
            raise torch.OutOfMemoryError

        zeros_like = torch.zeros_like
        trainer.optimizers[0].register_step_pre_hook(begin)


class OneGPU(Callback):
    """Lets a GPU run out of memory in the middle of a run: what torch may take of it is limited from then on.

    Args:
        mib: MiB beyond those that are reserved.
        step: Optimizer steps before that; None: from the start.
    """

    def __init__(self, mib: int, step: int | None) -> None:
        self.mib, self.step = mib, step

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the limit."""
        if self.step is None:
            self._limit()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sets the limit."""
        if trainer.global_step == self.step and batch_idx % trainer.accumulate_grad_batches == 0:
            self._limit()

    def _limit(self) -> None:
        torch.cuda.empty_cache()
        most = torch.cuda.memory_reserved() + self.mib * 2**20
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(0).total_memory)
