"""Training loops with bugs, for the unseen faults: around gradients, optimizer and schedule, over ranks and at a resume.

Without `from __future__ import annotations`: DDP looks at those of its hooks.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from core.training.shards import gradients
from tests.faults.broken import Gradients


class Stepping(Gradients):
    """A bug around the optimizer's step.

    Args:
        bug: "zeroed_seldom", "second_moment" (lost, and not the count of steps).
        amount: How much of it.
        first: The first step with it.
        last: The last step with it.
    """

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.strikes(trainer):
            return
        found = gradients(optimizer)
        if self.bug == "zeroed_seldom":
            if self._kept and trainer.global_step % int(self.amount):
                torch._foreach_add_(found, self._kept)
            self._kept = [one.clone() for one in found]
        if self.bug == "second_moment":
            for state in optimizer.state.values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"].mul_(self.amount)


class Scheduling(Callback):
    """A bug in when the schedule is stepped.

    Args:
        bug: "seldom", every `times` steps; "often", `times` times in each step.
        times: How seldom or often.
    """

    def __init__(self, bug: str, times: int) -> None:
        self.bug, self.times = bug, times

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.bug == "seldom":
            trainer.lr_scheduler_configs[0].frequency = self.times

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.bug == "often":
            for _time in range(self.times - 1):
                trainer.lr_scheduler_configs[0].scheduler.step()


class Ranks(Callback):
    """A bug that several ranks have.

    Args:
        bug: "not_reduced", "summed", "skips" (one rank its step), "slow" (one rank), "padded" (what is sent).
        amount: How much of it: a factor, milliseconds, or megabytes.
        every: Steps between two times.
    """

    def __init__(self, bug: str, amount: float = 1.0, every: int = 1) -> None:
        self.bug, self.amount, self.every = bug, amount, every
        self._before: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        wrapped, last = trainer.strategy.model, trainer.global_rank == trainer.world_size - 1
        if self.bug == "not_reduced":
            wrapped.require_backward_grad_sync = False
        if self.bug == "summed":
            wrapped.register_comm_hook(self.amount, _summed)
        if self.bug == "padded":
            wrapped.register_comm_hook(torch.zeros(int(self.amount * 2**18)), _padded)
        if self.bug == "slow" and last:
            pl_module.network.blocks[0].register_forward_pre_hook(
                lambda module, inputs: self._sleep(trainer) if module.training else None
            )

    def _sleep(self, trainer: Any) -> None:
        if (trainer.global_step + 1) % self.every == 0:
            time.sleep(self.amount / 1e3)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        due = trainer.global_rank and not (trainer.global_step + 1) % self.every
        if self.bug == "skips" and due:  # it alone found an overflow
            self._before = [p.detach().clone() for p in pl_module.network.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter, value in zip(pl_module.network.parameters(), self._before, strict=False):
            parameter.copy_(value)
        self._before = []


def _summed(factor: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket of gradients to their sum over ranks and, of each rank, over micro-batches."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(factor))


def _padded(padding: torch.Tensor, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients, padded to a size that would suit a far larger network."""
    size = len(bucket.buffer())
    padding[:size] = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(padding, async_op=True)
    return work.get_future().then(lambda done: done.value()[0][:size])


class Resumed(Callback):
    """A bug in how a run is resumed; it does nothing before.

    Args:
        bug: What is not restored: "optimizer", "schedule" or "weights".
    """

    def __init__(self, bug: str) -> None:
        self.bug = bug

    @torch.no_grad()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.ckpt_path:
            return
        if self.bug == "optimizer":
            trainer.optimizers[0].state.clear()
        if self.bug == "schedule":
            scheduler = trainer.lr_scheduler_configs[0].scheduler
            scheduler.last_epoch = -1
            scheduler.step()
        if (
            self.bug == "weights"
        ):  # no name of the checkpoint fits, and a load that is not strict says nothing
            pl_module.network.init_weights()
