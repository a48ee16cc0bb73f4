"""Drops an optimizer step whose loss or gradient norm is an outlier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from core.errors import ConfigError
from core.technique import Feature, technique
from core.training.figures import log_figures
from toolkit.outliers import OutlierWindow
from toolkit.updates import drop_update, drops_updates

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="OLMo-core's SkipStep optimizers: window 128, 6 sigma",
    owns=("optimizer_step",),
    needs=(Feature("drops_updates"),),
    before=("GradientClip",),
)
class SkipStep(Callback):
    """Skips the update of a step whose loss or gradient norm is an outlier in a rolling window.

    The decision is made on the device, without synchronisation. All ranks decide the same, because both
    figures are already reduced. A skipped step leaves weights and optimizer state as they are; the schedule
    continues. A loss or norm that is not finite is always skipped, from the second step on. An outlier enters
    the window as the limit that it exceeded: one spike does not hide the next, and a loss that stays higher
    is accepted in time. Logged: `skip_step/skipped`, steps skipped so far.

    Args:
        window: Steps of history; at least 2. The guard is idle until it is full.
        sigma: Standard deviations above the rolling mean that count as an outlier.

    Raises:
        ConfigError: If `window` < 2 or `sigma` <= 0, or the optimizer cannot drop an update on the device.

    Example:
        trainer:
          callbacks+:
            - class_path: SkipStep
              init_args: {window: 128, sigma: 6.0}
        model:
          optimizer: AdamW
    """

    def __init__(self, window: int = 128, sigma: float = 6.0) -> None:
        if window < 2 or not sigma > 0:
            raise ConfigError(f"SkipStep takes window >= 2 and sigma > 0, not {window} and {sigma}.")
        self._window = OutlierWindow(2, window, sigma)  # loss, gradient norm
        self._began = False
        self._skipped = torch.zeros((), dtype=torch.int64)

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that the optimizer is not fused."""
        if run.argument("model.optimizer.fused") is False:
            yield "only a fused optimizer drops updates on the device: leave out --model.optimizer.fused=false."

    def state_dict(self) -> dict[str, Any]:
        """Returns the window."""
        return self._window.state_dict() | {"skipped": int(self._skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the window of a checkpoint; one of another length is not used."""
        self._skipped = torch.tensor(state_dict["skipped"], device=self._skipped.device)
        self._window.load_state_dict(state_dict)
        self._began = True

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Moves the window to the device."""
        if not all(map(drops_updates, trainer.optimizers)):
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise ConfigError(
                f"SkipStep: {names} cannot drop an update on the device: take AdamW or SGD, fused."
            )
        self._window.to(pl_module.device)
        self._skipped = self._skipped.to(pl_module.device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Decides about the step."""
        outlier, _, _ = self._window.take(pl_module.step_loss, pl_module.gradient_norm(optimizer))
        if self._began:
            drop_update(optimizer, outlier)
            self._skipped += outlier
        self._began = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs how many steps were skipped."""
        if pl_module.logging_step:
            log_figures(trainer, {"skip_step/skipped": float(self._skipped)})
