"""Ends a run whose loss has left the course it was on."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from core.errors import ConfigError
from core.technique import technique


@technique(
    paper="running mean and variance: Finch, Incremental calculation of weighted mean and variance (2009), 9",
    api=">=1,<2",
)
class DivergenceGuard(Callback):
    """Stops the run when the loss is `sigma` deviations above its running mean, `patience` times in a row.

    It looks at the training loss of each logged step. One that is above the limit, or is not a number,
    counts and is left out of the mean. All ranks see the same loss, so all of them stop. The mean is part
    of the checkpoint: a resumed run is judged as if it had not stopped.

    Args:
        sigma: Standard deviations above the mean from which on a loss counts.
        patience: Logged steps in a row that count until the run ends; at least 1.
        warmup: Logged steps whose loss is only learned from; at least 2.
        weight: Share of the newest loss in mean and variance, between 0 and 1.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: DivergenceGuard
              init_args: {sigma: 6.0, patience: 3}
    """

    def __init__(self, sigma: float = 6.0, patience: int = 3, warmup: int = 10, weight: float = 0.1) -> None:
        for name, value, least in (("patience", patience, 1), ("warmup", warmup, 2)):
            if value < least:
                raise ConfigError(f"DivergenceGuard takes {name} >= {least} (logged steps), not {value}.")
        if sigma <= 0 or not 0 < weight < 1:
            raise ConfigError(
                f"DivergenceGuard takes sigma > 0 and 0 < weight < 1, not {sigma} and {weight}."
            )
        self.sigma, self.patience, self.warmup, self.weight = sigma, patience, warmup, weight
        self._state = {"mean": 0.0, "variance": 0.0, "seen": 0, "above": 0}

    def state_dict(self) -> dict[str, Any]:
        """Returns mean, variance, how many losses are in them, and how many in a row were above the limit."""
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self._state = dict(state_dict)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judges the loss of a logged step; in any other step that would be a wait for the device."""
        if not pl_module.logging_step:
            return
        loss = float(trainer.callback_metrics["train/loss"])
        if self.counts(loss):
            rank_zero_warn(
                f"DivergenceGuard ends the run: loss {loss:.3f} at step {trainer.global_step}, where it was "
                f"{self._state['mean']:.3f} on the mean."
            )
            trainer.should_stop = True

    def counts(self, loss: float) -> bool:
        """Takes in a loss, in nats per token; returns whether it is one too many above the limit."""
        state = self._state
        limit = state["mean"] + self.sigma * math.sqrt(state["variance"])
        if not math.isfinite(loss) or (state["seen"] >= self.warmup and loss > limit):
            state["above"] += 1
            return state["above"] >= self.patience
        self._learn(loss)
        return False

    def _learn(self, loss: float) -> None:
        state = self._state
        weight = self.weight if state["seen"] else 1.0  # the first loss is the mean
        step = weight * (loss - state["mean"])
        state["variance"] = (1 - weight) * (state["variance"] + step * (loss - state["mean"]))
        state["mean"] += step
        state["seen"] += 1
        state["above"] = 0
