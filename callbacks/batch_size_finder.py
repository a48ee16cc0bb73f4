"""Finds the largest micro-batch that fits into memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from core.contracts import HasStepContext, RunsAsForward
from core.errors import ConfigError
from core.lightning_compat import forget_loader
from core.technique import technique
from core.training.loop_state import convert_batch_counts
from toolkit import memory_limits
from toolkit.lone_ranks import DropsSteps, WithoutOthers
from toolkit.shards import RunsBackward
from toolkit.trials import compatibility_errors, restored_after, say, training_batches

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

ALONE = {
    "pipeline": "a stage runs micro-batches as others send and take them",
    "expert": "how many tokens a rank computes depends on what others send",
}
"""Sizes of a strategy's mesh -> why a rank cannot try a step by itself."""


@technique(
    paper="doubling and bisection as in Lightning's BatchSizeFinder, over the divisors of the batch",
    owns=("batch_size",),
    conflicts=memory_limits.TALKING
    | {"GradientAccumulationScheduler": "both would decide how many micro-batches a step takes"},
    before=("LRFinder", "RandomRestart"),
)
class BatchSizeFinder(Callback):
    """Finds the largest micro-batch that fits, before the run starts; the batch of a step stays as it is configured.

    That batch (`data.batch_size` rows, times `trainer.accumulate_grad_batches`) is then cut into as few micro-batches
    as memory allows, all of the same size. The run is bitwise the one with these numbers in its configuration, and
    so is a resumed one. A try is a step on full rows: forward, backward and update, with the optimizer's state. One
    that runs out of memory ends there, and its memory is freed. Afterwards everything is restored.

    On several ranks each tries without communication; then all agree on what fits everywhere. So no rank waits
    for one that ran out of memory. Under `FSDP` and `HybridParallel` a try takes the memory of gathered weights and reduced
    gradients, and each rank fills it by itself; so it does under `DeepSpeedZero` in stages 1 and 2, without offloading. In
    stage 3 ranks have to agree on the order in which parameters are gathered, which a step that broke off on one of them
    has not recorded. Validation uses micro-batches of the same size.

    Args:
        memory_limit: On a CPU: bytes that a step may take beyond what the process holds when the search begins.

    Raises:
        ConfigError: If `memory_limit` is below 1, or not even a single row fits.

    Example:
        trainer:
          accelerator: cpu
          callbacks+:
            - class_path: BatchSizeFinder
              init_args: {memory_limit: 2000000000}
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        memory_limits.check_limit("BatchSizeFinder", memory_limit)
        self.memory_limit = memory_limit
        self._found: int | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields what it cannot try or limit."""
        yield from memory_limits.compatibility_errors(run, own.arguments.get("memory_limit"))
        yield from compatibility_errors(run)
        strategy = next((item for item in run.selected if item.kind == "strategies"), None)
        given = strategy.arguments if strategy is not None else {}
        for size, why in ALONE.items():
            if (given.get(size) or 1) > 1:
                yield (
                    f"each rank tries steps by itself, and with {size} above 1 {why}: set --trainer.strategy.{size}=1, or "
                    "data.batch_size by hand"
                )
        if (given.get("context") or 1) > 1 and given.get("context_method") != "ulysses":
            yield (
                "each rank tries steps by itself, and around a ring keys and values go from one rank to another: set "
                "--trainer.strategy.context_method=ulysses, or data.batch_size by hand"
            )
        if run.argument("trainer.strategy.static_graph"):
            yield "DDP would record its first trial step as the static graph: set --trainer.strategy.static_graph=false"

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows of a micro-batch on each rank."""
        return {"batch_size": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores that number."""
        self._found = state_dict["batch_size"]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Sets what was found, before a resumed run builds anything that depends on it."""
        found = checkpoint["callbacks"].get(self.state_key, {}).get("batch_size")
        if found and trainer.state.fn == "fit":
            sizes = divisors(_rows(trainer))  # of other rows, perhaps, on other ranks
            self._set(trainer, sizes[bisect_right(sizes, found) - 1])
            convert_batch_counts(trainer, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Searches, and sets what was found, before the run builds anything else that depends on it."""
        if trainer.ckpt_path:
            return
        trainer.fit_loop.setup_data()
        sizes = divisors(_rows(trainer))
        with restored_after(trainer) as restore:
            found = largest(sizes, Attempt(trainer, self.memory_limit, restore))
        forget_loader(trainer)  # it is built when the run begins, with the rows of then
        if found is None:
            length = trainer.datamodule.sequence_length  # type: ignore[attr-defined]
            raise ConfigError(
                f"BatchSizeFinder: memory has no room for a step on a single row of {length:,} tokens.\n"
                "Shorten --data.sequence_length, add ActivationCheckpointing, or shard the model: "
                "--trainer.strategy=FSDP."
            )
        self._found = found
        self._set(trainer, found)
        trainer.strategy.setup_optimizers(trainer)  # schedules know how many steps an epoch has
        forget_loader(trainer)
        over = next((size for size in sizes if size > found), None)
        say(
            trainer,
            self,
            f"{found} rows fit{f', {over} do not' if over else ''}. Micro-batches of a step, on each rank: "
            f"{trainer.accumulate_grad_batches} x {found} rows.",
        )

    def _set(self, trainer: Trainer, batch_size: int) -> None:
        rows = _rows(trainer)
        trainer.datamodule.batch_size = batch_size  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = rows // batch_size


class Attempt:
    """Tries whether a micro-batch fits; called on every rank, with the same answer on each.

    Args:
        trainer: Its optimizer, weights and gradients are changed.
        limit: Bytes that a try may take beyond what the process holds now; None: what there is.
        restore: Restores training.
    """

    def __init__(self, trainer: Trainer, limit: int | None, restore: Callable[[], None]) -> None:
        self.trainer, self.restore = trainer, restore
        self.optimizer: Any = trainer.optimizers[0]
        self.rows = _rows(trainer)
        batches = training_batches(trainer)
        self.batch = widened(next(iter(batches))[1], batches.sequence_length)
        self.limit = None if limit is None else memory_limits.ceiling(limit)
        self.first = True

    def __call__(self, size: int) -> bool:
        """Returns whether `size` rows fit on every rank."""
        fits = self._fits(size) and (not self.first or self._fits(size))  # now with the optimizer's state
        self.first = False
        self.optimizer.zero_grad()
        memory_limits.give_back()
        failed = torch.tensor(float(not fits), device=self.trainer.strategy.root_device)
        if self.trainer.world_size > 1:
            failed = self.trainer.strategy.reduce(failed, reduce_op="sum")
        if failed:  # of some weights the optimizer may have made half of the state
            self.restore()
            self.first = True
        return not bool(failed)

    def _fits(self, size: int) -> bool:
        self.optimizer.zero_grad()
        strategy = self.trainer.strategy
        drops = strategy if isinstance(strategy, DropsSteps) else None
        with WithoutOthers() if drops else nullcontext():
            try:
                with memory_limits.limited(self.limit):
                    self._step(size)
            except Exception as error:
                if not memory_limits.is_out_of_memory(error):
                    raise
            else:
                return True
            memory_limits.give_back()
            if drops is not None:
                drops.drop_step()
        return False

    def _step(self, size: int) -> None:
        """Takes a step without talking to other ranks: past DDP's forward, its hooks do nothing."""
        trainer, module, strategy = self.trainer, self.trainer.lightning_module, self.trainer.strategy

        def run(name: str, *args: Any) -> Any:
            if isinstance(strategy, RunsAsForward):
                return strategy.run_as_forward(name, *args)
            return getattr(module, name)(*args)

        rows = torch.arange(size) % len(self.batch["input_ids"])
        batch = {name: values[rows] for name, values in self.batch.items()}
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        count = min(self.rows // size, 2)  # the second finds gradients there
        for number in range(count):
            deferred: AbstractContextManager[None] = nullcontext()
            if isinstance(strategy, DropsSteps) and isinstance(strategy, ParallelStrategy):
                deferred = strategy.block_backward_sync() if number + 1 < count else deferred
            with deferred:
                with trainer.precision_plugin.train_step_context():
                    loss: Any = run("training_step", batch, number)
                with strategy.step_context() if isinstance(strategy, HasStepContext) else nullcontext():
                    if isinstance(strategy, RunsBackward):
                        strategy.run_backward(loss)
                    else:
                        loss.backward()
        self.optimizer.step(lambda: None)  # that of DeepSpeed needs a closure


def widened(batch: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Returns a batch with rows of full length: packings may pad them to less. Other rows grow by the same factor."""
    width = batch["input_ids"].shape[1]
    sizes = {name: values.shape[1] for name, values in batch.items()}
    return {
        name: values[:, torch.arange(length * sizes[name] // width) % sizes[name]]
        for name, values in batch.items()
    }


def divisors(number: int) -> list[int]:
    """Returns the divisors, rising."""
    return [each for each in range(1, number + 1) if number % each == 0]


def largest(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest that fits, or None: about doubles it until one does not, then bisects.

    Args:
        sizes: Rising; what is larger than one that does not fit does not fit either.
        fits: Tries one.
    """
    good, bad, at = -1, len(sizes), 0
    while at < bad:
        if not fits(sizes[at]):
            bad = at
            break
        good = at
        at = max(bisect_right(sizes, 2 * sizes[at]) - 1, at + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(sizes[middle]) else (good, middle)
    return sizes[good] if good >= 0 else None


def _rows(trainer: Trainer) -> int:
    """Returns the rows of an optimizer step on each rank."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return int(data.batch_size * trainer.accumulate_grad_batches)
