"""Validation and checkpoints of an optimizer whose result is an average of the weights that it trains."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from core.contracts import AveragesWeights, KnowsItsWeights
from core.training.shards import reshard


class AveragedWeights(LightningModule):
    """Uses the average in validation, test and checkpoints; training continues with the weights in training.

    For optimizers that offer `core.contracts.AveragesWeights`: schedule-free ones. A checkpoint's weights are the average; those in training are
    saved beside it.
    """

    _saved_in_training: dict[str, Tensor] | None = None  # of a checkpoint, until training goes on
    _kept: list[Tensor] | None = None

    def _averaging(self) -> Any:
        optimizers = self.trainer.optimizers if self.trainer.state.fn == "fit" else []
        return next((o for o in optimizers if isinstance(o, AveragesWeights)), None)

    def on_validation_start(self) -> None:
        """Puts the average into the parameters."""
        if optimizer := self._averaging():
            self._show_average(optimizer)

    def on_validation_end(self) -> None:
        """Puts back what is trained."""
        if optimizer := self._averaging():
            self._train_on(optimizer)

    def _show_average(self, optimizer: Any) -> None:
        reshard(self)
        if not isinstance(optimizer, KnowsItsWeights):  # those that have it put back every bit by themselves
            self._kept = [parameter.detach().clone() for parameter in self.parameters()]
        optimizer.eval()

    @torch.no_grad()
    def _train_on(self, optimizer: Any) -> None:
        reshard(self)
        optimizer.train()
        if self._kept is not None:  # computed back they would be off in the last bits
            for parameter, value in zip(self.parameters(), self._kept, strict=True):
                parameter.copy_(value)
        self._kept = None

    def save_averages(self, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a checkpoint's `state_dict`, and the weights in training beside it; called on every rank."""
        if (optimizer := self._averaging()) is None:
            return
        shown = not _in_training(optimizer)  # in the middle of a validation
        if shown:
            self._train_on(optimizer)
        checkpoint["weights_in_training"] = self._copies(checkpoint["state_dict"])
        self._show_average(optimizer)
        checkpoint["state_dict"] |= self._copies(checkpoint["state_dict"])
        if not shown:
            self._train_on(optimizer)

    def _copies(self, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Returns what the strategy saves of the weights as they are now; it may gather them, so that `saved` is older."""
        weights = self.trainer.strategy.lightning_module_state_dict().items()
        return {n: w.detach().clone() for n, w in weights if n in saved and isinstance(w, Tensor)}

    def resume_training_weights(self) -> None:
        """Begins training, or goes on with the weights in training rather than with their average."""
        if (optimizer := self._averaging()) and not _in_training(optimizer):
            optimizer.train()
        if self._saved_in_training:
            weights = {"state_dict": self._saved_in_training}
            self.trainer.strategy.load_model_state_dict(weights, strict=False)
        self._saved_in_training = None


def _in_training(optimizer: Any) -> bool:
    """Returns whether the parameters are those that are trained, not their average."""
    if isinstance(optimizer, KnowsItsWeights):
        return bool(optimizer.in_training)
    return bool(optimizer.param_groups[0].get("train_mode", True))
