"""Finds where in the network a NaN or an infinity comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from core.contracts import HasStepContext, RunsAsForward, ScalesLosses
from core.errors import ConfigError
from core.technique import technique
from core.training.shards import gradients, local_tensors
from toolkit.shards import HoldsParts, RunsBackward
from toolkit.updates import drop_update, drops_updates


@technique(
    paper="own work; what torch.autograd.detect_anomaly does in each step, done only after a bad one",
    before=("GradientClip",),
    observer=True,
)
class NonFiniteGuard(Callback):
    """Stops a run whose loss or gradient norm is NaN or infinite, and names the module where it began.

    Each optimizer step records on the device whether both were finite; the host reads this when a step is logged.
    Updates are dropped from the first bad step on, so that the weights are still those before it
    (optimizers other than fused AdamW and SGD get zero gradients instead, and continue by momentum). Its
    batches are then run again, with the same random numbers, and every module is checked, forward and backward.

    Before that it costs the gradient norm, which clipping and logging need too, and keeps the batches since the
    last logged step. With fp16 gradients may overflow while the loss scale is being found: only the loss counts.

    Raises:
        ConfigError: In a run, if a loss or gradient norm is not finite; names the step and the module.

    Example:
        trainer:
          callbacks+:
            - class_path: NonFiniteGuard
    """

    def __init__(self) -> None:
        self._batches: list[list[tuple[Any, int]]] = [[]]
        self._figures: list[Tensor] = []
        self._bad = torch.zeros((), dtype=torch.bool)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Forgets an earlier run."""
        self._batches, self._figures = [[]], []
        self._bad = torch.zeros((), dtype=torch.bool, device=pl_module.device)
        precision: Any = trainer.precision_plugin
        own = isinstance(precision, ScalesLosses) and precision.scaler is not None
        # DeepSpeed's engine has a scaler of its own
        self._scaled = own or precision.precision == "16-mixed"

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keeps the micro-batch."""
        self._batches[-1].append((batch, batch_idx))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Notes whether the step is finite, and drops the updates from the first bad step on."""
        loss = pl_module.step_loss.float()
        norm = torch.zeros_like(loss) if self._scaled else pl_module.gradient_norm(optimizer).float()
        self._figures.append(torch.stack((loss, norm)))
        self._bad = self._bad | ~self._figures[-1].isfinite().all()
        if drops_updates(optimizer):
            drop_update(optimizer, self._bad)
        else:
            for gradient in local_tensors(gradients(optimizer)):
                gradient.masked_fill_(self._bad.to(gradient.device), 0.0)
        self._batches.append([])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reads the flags after a logged step."""
        if not pl_module.logging_step:
            return
        if bool(self._bad):
            figures = torch.stack(self._figures).tolist()
            first = next(index for index, pair in enumerate(figures) if not all(map(math.isfinite, pair)))
            step = trainer.global_step - len(figures) + first + 1
            loss, norm = figures[first]
            self._stop(trainer, pl_module, step, loss, norm, self._batches[first])
        self._batches, self._figures = [[]], []

    def _stop(
        self, trainer: Trainer, pl_module: Any, step: int, loss: float, norm: float, batches: Any
    ) -> None:
        found = repeat(trainer, pl_module, batches)
        if trainer.world_size > 1:
            everywhere: list[str | None] = [None] * trainer.world_size
            torch.distributed.all_gather_object(everywhere, found)
            ranks = [f"{text} (rank {rank})" for rank, text in enumerate(everywhere) if text]
            found = ranks[0] if ranks else None
        where = found or "nothing that is not finite, when the step was run again: it is not reproducible"
        raise ConfigError(
            f"NonFiniteGuard: in step {step} the loss is {loss:g}"
            f"{'' if self._scaled else f', the gradient norm {norm:g}'}. First found: {where}.\n"
            "Updates since then were dropped. Lower the learning rate, clip gradients (GradientClip), widen the "
            "precision of that module,\nor resume from an earlier checkpoint with SkipStep."
        )


def repeat(trainer: Trainer, pl_module: Any, batches: list[tuple[Any, int]]) -> str | None:
    """Runs micro-batches again, forward and backward; returns the first thing that is not finite, in words."""
    wrapped = trainer.model if trainer.model is not None else pl_module
    quiet = wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else nullcontext  # no rank waits
    strategy: Any = trainer.strategy
    gathers = isinstance(strategy, RunsAsForward)  # what is sharded over ranks
    step = partial(strategy.run_as_forward, "training_step") if gathers else pl_module.training_step
    context = strategy.step_context if isinstance(strategy, HasStepContext) else nullcontext
    backward = strategy.run_backward if isinstance(strategy, RunsBackward) else torch.Tensor.backward
    pl_module.zero_grad()
    with watched(pl_module.network, strategy) as found, quiet():
        for batch, index in batches:
            with trainer.precision_plugin.train_step_context():
                loss: Any = step(batch, index)
            if not found and not bool(loss.isfinite()):
                found.append("the loss, while what the network returned was finite")
            with context():
                backward(loss)
    return found[0] if found else None


@contextmanager
def watched(network: nn.Module, strategy: Any = None) -> Iterator[list[str]]:
    """Yields a list to which the first non-finite weight, output or gradient of a module is added."""
    found: list[str] = []
    handles: list[Any] = []

    def note(what: str, values: Any) -> None:
        if found:
            return
        for tensor in local_tensors(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                bad = int((~tensor.isfinite()).sum())
                found.append(f"{what}, {bad:,} of {tensor.numel():,} values")
                return

    for name, parameter in network.named_parameters():
        held = isinstance(strategy, HoldsParts) and parameter.requires_grad
        weight = strategy.weight_parts([parameter])[0] if held else parameter.detach()
        note(f"the weight {name}, before the step", weight)
        if parameter.requires_grad:
            handles.append(parameter.register_hook(lambda g, name=name: note(f"the gradient of {name}", g)))
    for name, module in network.named_modules():
        path = name or type(network).__name__
        forward = f"the output of {path} ({type(module).__name__}) going forward"
        backward = f"the gradient that {path} ({type(module).__name__}) passes on going backward"
        handles.append(module.register_forward_hook(lambda m, i, out, what=forward: note(what, out)))
        handles.append(module.register_full_backward_hook(lambda m, gi, go, what=backward: note(what, gi)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
