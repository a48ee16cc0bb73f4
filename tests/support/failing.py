"""Ranks that run out of memory at any operation of a micro-batch, and which gradients the step has in the end."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks.oom_guard import OOMGuard
from core.training.shards import gradients, local_tensors
from plugins.strategies import deepspeed_engine
from toolkit.shards import HoldsParts

GOLDEN = 0.6180339887
"""Its multiples, modulo 1, are spread evenly."""


class _Fails(TorchDispatchMode):
    """Counts the operations of a micro-batch but those that talk to other ranks, of which the one with this number raises."""

    supports_higher_order_operators = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count, self.on, self.failed = number, 0, False, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and func.namespace not in ("c10d", "_c10d_functional"):
            if self.count == self.number and _talks():
                self.number += 1
            if self.count == self.number:
                self.on, self.failed = False, str(func)
                raise torch.OutOfMemoryError("as if")
            self.count += 1
        return func(*args, **(kwargs or {}))


def _talks() -> bool:
    """Returns whether the operation is a part of a collective, within which memory cannot run out and be made good."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals["__name__"] != dist.distributed_c10d.__name__:
        frame = frame.f_back
    return frame is not None


class FailsAnywhere(Callback):
    """Lets ranks fail at another operation in each step, and asserts that its gradients are those of a step in two parts.

    The first step is left alone, and its operations are counted; the second begins in two parts. Of the others every third fails
    on rank 0, on rank 1, and on both, each somewhere else. All steps need the same batches, and a learning rate of 0.

    Args:
        failures: Of how many steps at least.
        bucket: Elements that DeepSpeed sends at once: few make it send many buckets during backward.
    """

    def __init__(self, failures: int, bucket: int | None = None) -> None:
        self.failures, self.repeated = failures, 0
        deepspeed_engine.BUCKET = bucket or deepspeed_engine.BUCKET
        self.counts: list[int] = []
        self.mode = _Fails(-1)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Counts from where forward begins."""
        [self.guard] = [each for each in trainer.callbacks if isinstance(each, OOMGuard)]
        step = trainer.strategy.training_step

        def counted(*args: Any) -> Any:
            self.mode.on = not self.mode.failed
            return step(*args)

        trainer.strategy.training_step = counted

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Chooses the operation."""
        step, micro_batch = trainer.global_step, batch_idx % trainer.accumulate_grad_batches
        if not micro_batch:
            self.guard.parts = 2 if step == 1 else 1
        number = -1
        if step > 1 and micro_batch == step // 3 % 2 and step % 3 in (trainer.global_rank, 2):
            number = int((step + 5 * trainer.global_rank) * GOLDEN % 1 * self.counts[micro_batch])
        self.mode = _Fails(number)
        self.mode.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Ends the count."""
        self.mode.on = False
        if trainer.global_step == 0:
            self.counts.append(self.mode.count)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the mode."""
        self.mode.__exit__(None, None, None)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Compares, where a rank has failed: a micro-batch that is not the first of its step has fewer operations."""
        strategy = trainer.strategy
        parts = (
            strategy.gradient_parts([*pl_module.parameters()]) if isinstance(strategy, HoldsParts) else None
        )
        found = [each.clone() for each in parts or local_tensors(gradients(optimizer))]
        assert found
        if trainer.global_step == 1:
            self.expected = found
        elif trainer.global_step > 1 and self.guard.parts == 2:
            self.repeated += 1
            for one, other in zip(found, self.expected, strict=True):
                assert torch.equal(one, other), self.mode.failed

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Counts the steps that failed."""
        assert self.repeated >= self.failures
