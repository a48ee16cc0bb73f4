"""Batch size and learning rate that follow the measured gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule, Trainer

from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import Feature, technique
from core.training.figures import log_figures
from toolkit.batch_shapes import Shape, ShapeSchedule
from toolkit.gradient_noise import MeasuresGradientNoise
from toolkit.trials import say

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

EXPONENTS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


@technique(
    paper="batch at the noise scale: arXiv:1812.06162, appendix D; rates: square root arXiv:2405.14578 (Adam), linear arXiv:1706.02677",
    needs=(Feature("gradient_noise_scale"),),
    after=("GradientNoiseScale",),
    owns=("batch_size",),
)
class AdaptiveBatchSize(ShapeSchedule):
    """Doubles or halves the batch so that it stays near the gradient noise scale that GradientNoiseScale measures.

    The batch doubles once `patience` measurements in a row have found the noise scale, times `target`, to be at least twice the
    batch, and halves once they found it to be at most half of it: within a factor of two around the batch nothing changes.
    Larger batches than the configured one take more micro-batches (`trainer.accumulate_grad_batches`), smaller ones fewer,
    and then smaller ones: memory never holds more than the configured micro-batch. A change may come some
    micro-batches late: Lightning steps where the number of micro-batches in the epoch is divisible by their number in a step.

    The learning rate of a step is that of the schedule times a power of the batch over the configured one. No token is lost or
    repeated, and a resumed run has the batches that it would have had. Logged: `adaptive_batch_size/share`, the batch over
    the configured one.

    Args:
        smallest: Least batch, over the configured one; above 0 and at most 1.
        largest: Largest batch, over the configured one; at least 1.
        target: Batch over noise scale that is aimed at, above 0; below 1 spends more steps and fewer tokens.
        patience: Measurements in a row after which the batch changes; at least 1.
        scale_lr: Power of the batch that the rate follows: "sqrt", as for Adam; "linear", as for SGD; or "none".

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: GradientNoiseScale
              init_args: {every_n_steps: 50}
            - class_path: AdaptiveBatchSize
              init_args: {smallest: 0.25, largest: 4.0}
    """

    def __init__(
        self,
        smallest: float = 0.25,
        largest: float = 4.0,
        target: float = 1.0,
        patience: int = 2,
        scale_lr: Literal["sqrt", "linear", "none"] = "sqrt",
    ) -> None:
        super().__init__()
        if not 0 < smallest <= 1 or not 1 <= largest < math.inf:
            raise ConfigError(
                f"AdaptiveBatchSize takes smallest above 0 and at most 1 and largest >= 1, not {smallest} and {largest}."
            )
        if not target > 0 or patience < 1 or scale_lr not in EXPONENTS:
            raise ConfigError(
                f"AdaptiveBatchSize takes target > 0, patience >= 1 and scale_lr of {', '.join(EXPONENTS)}, not {target}, "
                f"{patience} and {scale_lr}."
            )
        self.smallest, self.largest, self.target = smallest, largest, target
        self.patience, self.exponent = patience, EXPONENTS[scale_lr]
        self._doublings = self._votes = self._seen = 0
        self._source: MeasuresGradientNoise | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the stages of a pipeline could not split smaller batches."""
        staged = any((item.arguments.get("pipeline") or 1) > 1 for item in run.selected)
        if staged and own.arguments.get("smallest", 0.25) < 1:
            yield "a pipeline splits the configured rows of a micro-batch: set smallest to 1"

    @property
    def share(self) -> float:
        """The batch over the configured one."""
        return float(2.0**self._doublings)

    def shape(self, step: int, tokens: int, steps: int, full: Shape) -> Shape:
        """Returns the shape of a step; see `ShapeSchedule`."""
        rows = max(round(full.batch_size * full.accumulated * self.share), 1)
        # a step of several micro-batches keeps two, by which the noise can be measured
        least = min(2, full.accumulated, rows)
        accumulated = max(-(-rows // full.batch_size), least)
        return Shape(full.sequence_length, -(-rows // accumulated), accumulated)

    def lr_factor(self, tokens: int) -> float:
        """Returns the power of the share."""
        return float(self.share**self.exponent)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds what measures the noise, and sets the shape of the next step."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._source = next(one for one in callbacks if isinstance(one, MeasuresGradientNoise))
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decides after a measurement, and sets the shape of the next step."""
        assert self._source is not None
        if self._source.measurements != self._seen and not is_accumulating(trainer):
            self._seen = self._source.measurements
            if self._decide(self._source.batch_ratio):
                say(
                    trainer,
                    self,
                    f"{self.share:g} times the configured batch after step {trainer.global_step}.",
                )
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if pl_module.logging_step:
            log_figures(trainer, {"adaptive_batch_size/share": self.share})

    def state_dict(self) -> dict[str, Any]:
        """Returns the share and the measurements that count towards the next change."""
        own = {"doublings": self._doublings, "votes": self._votes, "seen": self._seen}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._doublings, self._votes = state_dict["doublings"], state_dict["votes"]
        self._seen = state_dict["seen"]

    def _decide(self, ratio: float | None) -> bool:
        """Returns whether the share has changed."""
        wanted = 0.0 if ratio is None else math.log2(ratio * self.target)
        vote = 1 if wanted >= 1 else -1 if wanted <= -1 else 0
        self._votes = self._votes + vote if vote * self._votes >= 0 and vote else vote
        within = self.smallest <= 2.0 ** (self._doublings + vote) <= self.largest
        if abs(self._votes) < self.patience or not within:
            return False
        self._doublings, self._votes = self._doublings + vote, 0
        return True
