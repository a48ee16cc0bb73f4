"""An average of the weights over the run, evaluated beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from core.errors import ConfigError
from core.technique import technique
from core.training.loss_ranks import loss_of
from core.training.shards import local, reshard, take, whole
from core.training.token_sums import TokenSums


@technique(
    paper="Polyak averaging; decay and its warm-up as in Inception, arXiv:1512.00567, section 8, and TensorFlow"
)
class ExponentialMovingAverage(Callback):
    """Keeps an exponential moving average of the weights and logs its validation loss, `val/ema_loss`.

    After optimizer step n the average is d times what it was plus 1 - d times the weights, with d the lesser
    of `decay` and n / (n + 9): early on it forgets the initial weights quickly. It costs as much memory as the
    weights, and validation a second forward pass. Every rank averages what it holds of the weights.

    Args:
        decay: The largest d; 0 to below 1.
        every_n_steps: Optimizer steps from one update to the next.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: ExponentialMovingAverage
              init_args: {decay: 0.999}
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1 or every_n_steps < 1:
            raise ConfigError(
                "ExponentialMovingAverage takes decay from 0 to below 1 and every_n_steps from 1 upwards, "
                f"not {decay} and {every_n_steps}."
            )
        self.decay, self.every_n_steps = decay, every_n_steps
        self._averages: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor] = {}
        self._updates = self._step = 0
        self._sums = TokenSums()

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole averages, on the host."""
        averages = {name: whole(value).cpu() for name, value in self._averages.items()}
        return {"averages": averages or self._restored, "updates": self._updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there, as soon as training starts, or at once where it has."""
        self._restored, self._updates = dict(state_dict["averages"]), state_dict["updates"]
        self._step = state_dict.get("step", 0)
        self._take_restored()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with the weights as they are, or with what was restored."""
        self._step = trainer.global_step
        reshard(pl_module)  # after a sanity check whole weights are here
        named = pl_module.network.named_parameters()
        parameters = {name: p for name, p in named if p.requires_grad}  # the others stay as they are
        self._averages = {name: p.detach().clone() for name, p in parameters.items()}
        self._take_restored()
        self._pairs = local(self._averages.values()), local(p.detach() for p in parameters.values())

    def _take_restored(self) -> None:
        for name, average in self._averages.items():
            if name in self._restored:
                take(average, self._restored[name])
        if self._averages:
            self._restored = {}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes in the weights after an optimizer step whose turn it is."""
        step = trainer.global_step
        if step == self._step or step % self.every_n_steps:
            return
        self._step, self._updates = step, self._updates + 1
        weight = 1 - min(self.decay, self._updates / (self._updates + 9))
        torch._foreach_lerp_(*self._pairs, weight)

    @contextmanager
    def averaged(self, module: LightningModule) -> Iterator[None]:
        """Lends the averages to the network of a module."""
        averages, weights = self._pairs
        with torch.no_grad():
            own = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, averages)
        reshard(module)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, own)
            reshard(module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        loader: int = 0,
    ) -> None:
        """Evaluates the averages on the batch that the weights have just been evaluated on."""
        if self._averages and not trainer.sanity_checking:
            with self.averaged(pl_module), trainer.precision_plugin.val_step_context():
                loss = loss_of(trainer, pl_module, batch)
            self._sums.add({"loss": loss})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the averages' loss."""
        if not self._averages or trainer.sanity_checking:
            return
        means, _ = self._sums.means(pl_module._sum_over_ranks)
        for logger in trainer.loggers:
            logger.log_metrics({"val/ema_loss": means["loss"]}, step=trainer.global_step)
        trainer.callback_metrics["val/ema_loss"] = torch.tensor(means["loss"], dtype=torch.float64)
