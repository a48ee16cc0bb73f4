"""Continues with smaller micro-batches when memory runs out during a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor

from core.errors import ConfigError
from core.lightning_compat import is_accumulating, replace_closure, restore_closure, zero_gradients
from core.technique import technique
from core.training.seeding import mix
from core.training.shards import gradients
from toolkit import memory_limits
from toolkit.gradient_buckets import average_in_buckets
from toolkit.joint_steps import JointSteps
from toolkit.lone_ranks import DropsSteps

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

DDP_OPTIONS = {
    "static_graph": (True, "false"),
    "find_unused_parameters": (True, "false"),
    "compression": ("bf16", "fp16", "powersgd", "none"),
}
"""Option of DDP -> the values under which gradients cannot be averaged after backward; last, one under which they can."""

EXCHANGING = {
    "pipeline": "stages send each other activations one by one, and a rank cannot make up for others what it has sent or not",
    "expert": "what ranks send each other depends on values, which a rank that repeats a step does not have",
}
"""Sizes of a strategy's mesh -> why a rank cannot make the messages for which others wait."""


@technique(
    paper="gradient accumulation in place of memory, as in Composer's automatic microbatching",
    conflicts=memory_limits.TALKING,
    before=("LRFinder", "RandomRestart"),
    after=("BatchSizeFinder",),
)
class OOMGuard(Callback):
    """Halves the micro-batch and repeats the step when its forward or backward runs out of memory.

    From then on each micro-batch is computed in twice as many parts, one after the other, whose gradients add up:
    gradient accumulation within each micro-batch. The batch of a step, the order of tokens, the schedule and all counts
    stay as they are. The gradients of the step so far are dropped and all its micro-batches computed again, so
    that nothing is lost or counted twice; a run that begins with the smaller parts gives the same result up to
    rounding. The number of parts is saved in checkpoints. The run ends if a single row does not fit, and also if an
    update or a validation runs out of memory.

    Under `DDP` each rank splits its own micro-batches. Gradients are averaged after backward, not during it: the other ranks
    wait there for one that repeats the step. Under `FSDP` and `HybridParallel`, where ranks exchange weights and gradients
    during forward and backward, all split theirs alike. A rank that runs out of memory makes the exchanges for which the
    others wait in a step on a single row, and all repeat theirs; with `tensor`, or `context` and Ulysses, where the shapes of
    messages depend on the rows, in a step on all rows that keeps no activations. For this they tell each other after each part
    whether memory was enough: log2(ranks) messages between CPUs, which do not wait for the device. All need the same number of
    rows in a micro-batch there, as leyden's data modules give them. So it is under `DeepSpeedZero` in stages 1 and 2, without
    offloading, whose ranks exchange gradients during backward.

    Args:
        memory_limit: On a CPU: bytes that forward and backward may take beyond what the process holds when training
            starts.

    Raises:
        ConfigError: If `memory_limit` is below 1, or a single row does not fit.

    Example:
        trainer:
          accelerator: cpu
          callbacks+:
            - class_path: OOMGuard
              init_args: {memory_limit: 2000000000}
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        memory_limits.check_limit("OOMGuard", memory_limit)
        self.memory_limit = memory_limit
        self.parts = 1
        self._most: int | None = None
        self._step: list[tuple[Any, int]] = []
        self._joint: JointSteps | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what it cannot limit, or average."""
        yield from memory_limits.compatibility_errors(run, own.arguments.get("memory_limit"))
        for name, (*bad, good) in DDP_OPTIONS.items():
            if (value := run.argument(f"trainer.strategy.{name}")) in bad:
                yield (
                    f"it averages gradients after backward, where DDP does not support {name}={value}: set "
                    f"--trainer.strategy.{name}={good}"
                )
        sizes = {name: run.argument(f"trainer.strategy.{name}") or 1 for name in (*EXCHANGING, "context")}
        for size, why in EXCHANGING.items():
            if sizes[size] > 1:
                yield f"with {size} above 1 {why}: set --trainer.strategy.{size}=1"
        if sizes["context"] > 1 and run.argument("trainer.strategy.context_method") != "ulysses":
            yield (
                "keys and values go around a ring one by one, which a rank cannot make up for others: set "
                "--trainer.strategy.context_method=ulysses"
            )
        word = run.argument("trainer.strategy")
        if isinstance(word, str) and "find_unused_parameters_true" in word:
            yield "it averages all gradients on all ranks: take --trainer.strategy=DDP, without unused parameters"

    def state_dict(self) -> dict[str, Any]:
        """Returns the parts of a micro-batch."""
        return {"parts": self.parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores their number."""
        self.parts = state_dict["parts"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replaces the function that computes the gradients of a micro-batch."""
        if self.memory_limit is not None:
            self._most = memory_limits.ceiling(self.memory_limit)
        if isinstance(trainer.strategy, DropsSteps):
            self._joint = JointSteps(pl_module, trainer.strategy)
        [optimizer] = trainer.optimizers
        replace_closure(
            trainer,
            lambda kwargs: Closure(
                lambda: self._gradients(trainer, optimizer, kwargs["batch"], kwargs["batch_idx"])
            ),
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the function."""
        restore_closure(trainer)
        self._step, self._joint = [], None

    def _gradients(self, trainer: Trainer, optimizer: Any, batch: Any, number: int) -> ClosureResult:
        """Adds the gradients of a micro-batch to those of the step, with as many attempts as needed."""
        module: Any = trainer.lightning_module
        if number % trainer.accumulate_grad_batches == 0:
            self._step, self._window, module.in_parts = [], module.train_sums.copy(), self.parts > 1
        self._step.append((batch, number))
        todo = self._step[-1:]
        while (loss := self._attempt(trainer, optimizer, todo)) is None:
            self._halve(trainer, batch)
            optimizer.zero_grad()
            module.train_sums, module.step_sums, module.in_parts = self._window.copy(), None, True
            memory_limits.give_back()
            todo = self._step
        if trainer.world_size > 1 and self._joint is None and not is_accumulating(trainer):
            average_in_buckets(gradients(optimizer))
        return ClosureResult(loss)

    def _attempt(self, trainer: Trainer, optimizer: Any, todo: list[tuple[Any, int]]) -> Tensor | None:
        """Computes micro-batches of the step; returns the loss of the last, or None: out of memory."""
        total = None
        for batch, number in todo:
            total, pieces = None, split(batch, self.parts)
            for part, rows in enumerate(pieces):
                more = part + 1 < len(pieces) or number != todo[-1][1] or is_accumulating(trainer)
                loss = self._part(trainer, Part(rows, number, part, more, optimizer))
                if loss is None:
                    return None
                total = loss if total is None else total + loss
        return total

    def _part(self, trainer: Trainer, part: Part) -> Tensor | None:
        """Computes one part; returns its loss, or None: out of memory, of one of the ranks if they talk meanwhile."""
        with memory_limits.limited(self._most):
            if self._joint is not None:
                return self._joint.run(
                    partial(part.compute, trainer), partial(part.first_row().compute, trainer)
                )
            try:
                return part.compute(trainer)
            except Exception as error:
                if not memory_limits.is_out_of_memory(error):
                    raise
        return None  # the traceback of the error holds the graph: both are freed here

    def _halve(self, trainer: Trainer, batch: Any) -> None:
        short = trainer.global_rank if self._joint is None else self._joint.failed
        rows, where = len(batch["input_ids"]), f"in step {trainer.global_step + 1}, on rank {short}"
        now = -(-rows // self.parts)
        if now == 1:
            raise ConfigError(
                f"OOMGuard: out of memory {where}, with a single row of {batch['input_ids'].shape[1]:,} tokens.\n"
                "Shorten --data.sequence_length, add ActivationCheckpointing, or shard the model: --trainer.strategy=FSDP."
            )
        self.parts *= 2
        if trainer.global_rank == short:
            print(
                f"OOMGuard: out of memory {where}: micro-batches of {rows} rows are computed in parts of "
                f"{-(-rows // self.parts)}, not {now}, from now on.",
                file=sys.stderr,
                flush=True,
            )


@dataclass(frozen=True)
class Part:
    """Some rows of a micro-batch.

    Attributes:
        rows: A batch of them.
        micro_batch: Number of the micro-batch in its epoch.
        number: Number of the part in the micro-batch.
        more: Whether other parts of the optimizer step follow.
        optimizer: Whose gradients are zeroed before the first backward of a step.
    """

    rows: dict[str, Tensor]
    micro_batch: int
    number: int
    more: bool
    optimizer: Any

    def first_row(self) -> Part:
        """Returns a part of a single row."""
        return replace(self, rows={name: values[:1] for name, values in self.rows.items()})

    def compute(self, trainer: Trainer) -> Tensor:
        """Runs forward and backward; returns the loss."""
        # Each part has its own random numbers.
        index = mix(self.micro_batch, self.number) if self.number else self.micro_batch
        strategy: Any = trainer.strategy
        sharded = isinstance(strategy, DropsSteps)
        with strategy.block_backward_sync() if sharded and self.more else nullcontext():
            if sharded:
                output: Any = strategy.training_step(self.rows, index)
            else:  # not through DDP's forward, which may wait for other ranks
                with trainer.precision_plugin.train_step_context():
                    output = trainer.lightning_module.training_step(self.rows, index)
            if not self.number:
                zero_gradients(trainer, self.micro_batch, self.optimizer)
            loss = output / trainer.accumulate_grad_batches
            strategy.backward(loss, self.optimizer)
        return loss.detach().clone()


def split(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Returns a batch split into this many parts of about equal size, or into single rows where there are fewer."""
    if parts == 1:
        return [batch]
    parts = min(parts, len(batch["input_ids"]))
    names, values = zip(*batch.items(), strict=True)
    cut = zip(*(torch.tensor_split(value, parts) for value in values), strict=True)
    return [dict(zip(names, part, strict=True)) for part in cut]
