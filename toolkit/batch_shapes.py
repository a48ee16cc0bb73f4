"""The base class of callbacks that change sequence length and batch size during a run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from core.data.token_datamodule import TRAIN_ON, TokenDataModule
from core.errors import ConfigError
from core.lightning_compat import is_accumulating

if TYPE_CHECKING:
    from toolkit.selection import Run

__all__ = ["Shape", "ShapeSchedule", "shapes_of"]

_LOOKS = 20_000
"""Before a run the shapes of this many first steps are computed, and of as many, evenly spaced, of the others."""


class Shape(NamedTuple):
    """What an optimizer step takes on each rank.

    Attributes:
        sequence_length: Tokens in a row.
        batch_size: Rows of a micro-batch.
        accumulated: Micro-batches of the step.
    """

    sequence_length: int
    batch_size: int
    accumulated: int


class ShapeSchedule(Callback, ABC):
    """A callback that gives each optimizer step its shape, through the data module's `reshape_batches`.

    No token is lost or repeated at a change, and a resumed run continues with the shape of its step. Where
    `data.num_workers` is not 0, what workers have read ahead is read again at each change.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._step_tokens = 0
        self._accumulated: int | None = None
        self._full: Shape | None = None
        self._dp_size = 1

    @abstractmethod
    def shape(self, step: int, tokens: int, steps: int, full: Shape) -> Shape:
        """Returns the shape of a step.

        Args:
            step: Optimizer steps before it.
            tokens: Positions that they took on all ranks, padding included.
            steps: Optimizer steps of the run; -1 where that is not known.
            full: The configured shape; the micro-batch must not have more tokens.

        Raises:
            ConfigError: If it needs the number of steps and does not know it.
        """

    def lr_factor(self, tokens: int) -> float:
        """Returns what the learning rate is multiplied by after so many tokens."""
        return 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the configured shape, and sets that of the next step."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenDataModule):
            raise ConfigError(
                f"{type(self).__name__} changes the rows of stored tokens, which {type(data).__name__} does not read.\n"
                f"{TRAIN_ON}."
            )
        if self._full is None:
            self._full = Shape(data.sequence_length, data.batch_size, trainer.accumulate_grad_batches)
        self._dp_size = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        if self._accumulated is not None:  # a change may still be pending
            trainer.accumulate_grad_batches = self._accumulated
        self._set(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Counts positions: the shapes are known on the host."""
        self._step_tokens += batch["input_ids"].numel() * self._dp_size

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sets the shape of the next step, after the last batch of a step."""
        if is_accumulating(trainer):
            return
        self.tokens, self._step_tokens = self.tokens + self._step_tokens, 0
        self._set(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the tokens so far, and the micro-batches of the step."""
        return {"tokens": self.tokens, "step_tokens": self._step_tokens, "accumulated": self._accumulated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.tokens, self._step_tokens = state_dict["tokens"], state_dict["step_tokens"]
        self._accumulated = state_dict["accumulated"]

    def _set(self, trainer: Trainer) -> None:
        assert self._full is not None
        loader: Any = trainer.datamodule.training_loader.batches  # type: ignore[attr-defined]
        now = Shape(loader.sequence_length, loader.batch_size, trainer.accumulate_grad_batches)
        wanted = self.shape(trainer.global_step, self.tokens, trainer.max_steps, self._full)
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if batches % wanted.accumulated:  # Lightning steps where their number is divisible by it
            rows = min(wanted.batch_size * wanted.accumulated // now.accumulated, self._most_rows(wanted))
            wanted = Shape(wanted.sequence_length, max(rows, 1), now.accumulated)
        if wanted[:2] != now[:2]:
            trainer.datamodule.reshape_batches(wanted.sequence_length, wanted.batch_size)  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = self._accumulated = wanted.accumulated
        module: Any = trainer.lightning_module
        module.lr_factors[type(self).__name__] = self.lr_factor(self.tokens)

    def _most_rows(self, wanted: Shape) -> int:
        assert self._full is not None
        return self._full.sequence_length * self._full.batch_size // wanted.sequence_length


def shapes_of(run: Run, dp_size: int) -> Iterator[tuple[str, set[Shape]]]:
    """Yields, for a technique's `preflight`, each schedule's name and the shapes that steps of the run will have.

    Args:
        run: The run; nothing is known of one without a number of steps.
        dp_size: Ranks that read different data.
    """
    sizes = [run.argument(path) for path in ("data.sequence_length", "data.batch_size", "trainer.max_steps")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return
    length, rows, steps = sizes
    full = Shape(length, rows, run.argument("trainer.accumulate_grad_batches") or 1)
    for item in run.selected:
        if isinstance(item.target, type) and issubclass(item.target, ShapeSchedule):
            with suppress(Exception):  # what is wrong is reported when it is checked and built
                yield item.name, set(_shapes(item.target(**item.arguments), steps, full, dp_size))


def _shapes(schedule: ShapeSchedule, steps: int, full: Shape, dp_size: int) -> Iterator[Shape]:
    looks = [*range(min(steps, _LOOKS)), *range(_LOOKS, steps, max(1, (steps - _LOOKS) // _LOOKS)), steps]
    tokens = 0
    for step, following in pairwise(looks):
        yield (shape := schedule.shape(step, tokens, steps, full))
        tokens += math.prod(shape) * dp_size * (following - step)
