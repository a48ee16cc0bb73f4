"""Validation and checkpoints of an optimizer whose result is an average of the weights that it trains."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from core.checkpoints.checkpoint import EXTRA_STATE


class AveragedWeights(LightningModule):
    """Shows the average wherever results are looked at, and trains on as if nobody had looked.

    For optimizers with `eval()`, which puts the average into the parameters, and `train()`, which puts back
    exactly what was there: schedule-free ones. A checkpoint's weights are the average; those in training are
    saved beside it.
    """

    _in_training: dict[str, Tensor] | None = None

    def _averaging(self) -> Any:
        optimizers = self.trainer.optimizers if self.trainer.state.fn == "fit" else []
        return next((o for o in optimizers if hasattr(o, "eval") and hasattr(o, "train")), None)

    def on_validation_start(self) -> None:
        """Puts the average into the parameters."""
        if optimizer := self._averaging():
            optimizer.eval()

    def on_validation_end(self) -> None:
        """Puts back what is trained."""
        if optimizer := self._averaging():
            optimizer.train()

    def save_averages(self, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a checkpoint's `state_dict`, and the weights in training beside it."""
        optimizer, saved = self._averaging(), checkpoint["state_dict"]
        if optimizer is None:
            return
        shown = not optimizer.in_training  # in the middle of a validation
        if shown:
            optimizer.train()
        own = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
        checkpoint["weights_in_training"] = {name: value.clone() for name, value in own.items()}
        optimizer.eval()
        checkpoint["state_dict"] = {**saved, **{name: value.clone() for name, value in own.items()}}
        if not shown:
            optimizer.train()

    def load_training_weights(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the weights in training until they are asked for."""
        self._in_training = checkpoint.get("weights_in_training")

    def resume_training_weights(self) -> None:
        """Goes on with the weights in training rather than with their average."""
        if self._in_training:
            with torch.no_grad():
                own = self.state_dict(keep_vars=True)
                for name, value in self._in_training.items():
                    if not name.endswith(EXTRA_STATE):
                        own[name].copy_(value)
        self._in_training = None
