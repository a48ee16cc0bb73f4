"""Optimizers, schedules and steps with bugs, for the second unseen faults: also over ranks and at a resume.

Without `from __future__ import annotations`: DDP looks at those of its hooks.
"""

from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from core.training.shards import gradients
from plugins.optimizers.adamw import AdamW
from plugins.optimizers.muon import Muon
from tests.faults.broken import Once

# -- optimizer and schedule ------------------------------------------------------------------------------


class InverseSquareRoot(LambdaLR):
    """The rate falls with the root of the step, as in the first Transformer, and the warm-up was left out.

    Args:
        optimizer: The optimizer.
        first: What the rate is multiplied by in the first step.
    """

    def __init__(self, optimizer: Any, first: float) -> None:
        super().__init__(optimizer, lambda step: first / (step + 1) ** 0.5)


class Compounding(Callback):
    """Each step multiplies the rate of the step before, in the place of the configured one.

    Args:
        factor: In each step.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.lr_factors["Compounding"] = self.factor**trainer.global_step


class _DecaysByItself:
    """Weights decay a second time, by a share that is not multiplied by the learning rate."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            for group in self.param_groups:  # type: ignore[attr-defined]
                torch._foreach_mul_(group["params"], 1 - group["weight_decay"])
        return loss


class DecayingAdamW(_DecaysByItself, AdamW):
    pass


class DecayingMuon(_DecaysByItself, Muon):
    pass


class Repeated(Once):
    """A step is made many times over: it is tried again although it had succeeded.

    Args:
        times: How often.
        first: The first step after which it happens.
        last: The last one.
    """

    def __init__(self, times: int, first: int, last: int) -> None:
        self.times, self.first, self.last = times, first, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.strikes(trainer):
            for _time in range(self.times):
                trainer.optimizers[0].step()


# -- gradients -------------------------------------------------------------------------------------------


class ClippedOneByOne(Callback):
    """Each gradient is clipped to a share of its weight's norm, which is far too small.

    Args:
        share: The share.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def clip(optimizer: Any, *_: Any, **__: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in (p for p in group["params"] if p.grad is not None):
                    limit = self.share * parameter.detach().norm().clamp(min=1e-3)
                    parameter.grad.mul_((limit / parameter.grad.norm().clamp(min=1e-30)).clamp(max=1))

        pl_module.configure_gradient_clipping = clip


class Delayed(Callback):
    """Each step takes the gradients of an earlier one, as workers do that nobody waits for.

    Args:
        steps: How much earlier.
    """

    def __init__(self, steps: int) -> None:
        self._waiting: deque[list[Tensor]] = deque(maxlen=steps + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = gradients(optimizer)
        self._waiting.append([one.clone() for one in found])
        torch._foreach_copy_(found, self._waiting[0])


class OnlyTheLast(Callback):
    """Gradients are zeroed before each micro-batch, and not before each step: the last one alone counts."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        pl_module.zero_grad()


# -- ranks -----------------------------------------------------------------------------------------------


class AcrossRanks(Callback):
    """A bug that several ranks have.

    Args:
        bug: "half_sent" (gradients, in fp16), "gathered" (figures in each step), "own_weights" (other first weights).
        amount: How much of it: a factor, or megabytes.
    """

    def __init__(self, bug: str, amount: float = 1.0) -> None:
        self.bug, self.amount = bug, amount

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.bug == "half_sent":
            trainer.strategy.model.register_comm_hook(self.amount, _half_sent)
        if self.bug == "own_weights" and trainer.global_rank:  # each rank has a seed of its own
            torch.manual_seed(1000 + trainer.global_rank)
            pl_module.network.init_weights()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.bug == "gathered":  # hidden states of all tokens, for a figure that is logged
            dist.all_reduce(torch.zeros(int(self.amount * 2**18)))


def _half_sent(scale: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients that are sent in fp16, with a scale that does not suit them."""
    sent = (bucket.buffer() * scale).half()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float() / scale / dist.get_world_size())


# -- resuming --------------------------------------------------------------------------------------------


class ResumedWrongly(Callback):
    """A bug in how a run is resumed.

    Args:
        bug: "moments" (those of other weights), "older_weights" (those of an earlier step).
        step: The earlier step.
        path: Where its weights are kept.
    """

    def __init__(self, bug: str, step: int = 0, path: str = "") -> None:
        self.bug, self.step, self.path = bug, step, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.bug == "older_weights" and trainer.global_step == self.step:
            torch.save(pl_module.network.state_dict(), Path(self.path))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.ckpt_path:
            return
        if self.bug == "older_weights":
            pl_module.network.load_state_dict(torch.load(self.path, weights_only=True))
        if self.bug == "moments":
            _rotate(trainer.optimizers[0])


def _rotate(optimizer: Any) -> None:
    """Gives each weight the state of another one of its shape: the order of parameters has changed."""
    alike: dict[Any, list[Any]] = {}
    for parameter, state in optimizer.state.items():
        alike.setdefault((parameter.shape, *state), []).append(parameter)
    for group in alike.values():
        states = [optimizer.state[parameter] for parameter in group]
        for parameter, state in zip(group, states[1:] + states[:1], strict=True):
            optimizer.state[parameter] = state


class TrainsOnValidation(Callback):
    """Validation batches are trained on: the loop over them was copied, with its backward pass and its steps.

    Args:
        passes: Over the batches of each validation.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self._batches: list[dict[str, Tensor]] = []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        self._batches.append(dict(batch))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batches = [{name: value.clone() for name, value in one.items()} for one in self._batches]
        self._batches, optimizer = [], trainer.optimizers[0]
        for one in batches * self.passes:
            optimizer.zero_grad()
            pl_module.compute_loss(one)[0].mean.backward()
            optimizer.step()
