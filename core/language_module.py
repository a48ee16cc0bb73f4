"""What is trained: a network, an objective, an optimizer and a schedule, put together for Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.checkpoints.checkpoint import check_weights
from core.configuration.building import changed
from core.contracts import Network, Objective, TokenSum, check_fit
from core.runs.every_step import look_once
from core.runs.stopping import StopSignals, listen
from core.training.averaged_weights import AveragedWeights
from core.training.loop_state import rescale, settle
from core.training.loss_ranks import gradient_norm, group_of, place_of, scale_gradients, sum_over
from core.training.parameter_groups import parameter_groups
from core.training.scheduling import ScheduleClock, prefer_written, scaled_rates, written_settings
from core.training.seeding import mix, seed_generators
from core.training.token_sums import TokenSums, named, wide
from core.training.updates import keep_updates

GRADIENT_TOKENS = 4096.0
"""Divides summed losses before backward. A power of two: it changes exponents and rounds nothing."""

FREQUENT = {"_current_fx_name", "logging_step", "_epoch", "step_loss", "_step_sums", "_norm", "in_parts"}
"""Attributes that are set in every step, and are no modules, parameters or buffers."""


class LanguageModule(AveragedWeights):
    """Trains a network so that every label token of a global batch weighs the same.

    Gradients are those of the sum of all token losses over the number of label tokens, counted over
    micro-batches and ranks, however unevenly the tokens are spread. torch's generators are seeded
    anew before each micro-batch from (seed, epoch, batch, rank): what other techniques draw does not
    change the training, and a resumed run needs no generator state.

    Logged every `trainer.log_every_n_steps` optimizer steps, over all tokens since the last time:
    `train/loss` (nats per token), `train/perplexity`, `train/tokens` (label tokens since the start of
    the run), `train/lr`, `train/grad_norm` (before clipping), `epoch/NAME` (how often each source of the data
    has been gone through, where the data module has `epochs`); after validation `val/loss` and `val/perplexity`.
    Other steps never wait for the device.

    Args:
        network: What is trained; built in `configure_model`, so that strategies can shard it.
        objective: What is minimised.
        optimizer: Called with parameter groups. Norms and biases (parameters of fewer than two
            dimensions) come in a group with `weight_decay` 0.
        lr_scheduler: Called with the optimizer and stepped after each optimizer step.
        decay_embeddings: Whether embedding weights (tied output weights too) are decayed.
        parameter_options: Pattern of parameter names -> settings of the optimizer that hold for them instead,
            such as {"*.q_proj.weight": {weight_decay: 0.0}}; `*` stands for anything, later patterns win.

    Attributes:
        logging_step: True from the optimizer step until the end of a batch whose figures are logged.
        tokens_seen: Label tokens of all ranks since the start of the run, as of the last logged step.
        step_loss: Mean loss over all label tokens of the optimizer step, of all ranks; 0-d, on the device. From
            `on_before_optimizer_step` of the step on.
        in_parts: Whether a callback computes micro-batches in parts, each with a `training_step`.
        rate_factors: Who -> what the schedule's learning rates are multiplied by, in the coming steps.
    """

    network: Network

    def __init__(
        self,
        network: Callable[[], Network],
        objective: Objective,
        optimizer: Callable[[Any], Optimizer],
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        decay_embeddings: bool = True,
        parameter_options: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.build_network, self.objective = network, objective
        self.build_optimizer = optimizer
        self.build_lr_scheduler = lr_scheduler
        self.decay_embeddings, self.parameter_options = decay_embeddings, parameter_options or {}
        self.logging_step = self.in_parts = False
        self.tokens_seen = 0
        self._window = TokenSums()
        self._validation = TokenSums()
        self.step_loss: Tensor | None = None
        self._step_sums: Tensor | None = None
        self._norm: Tensor | None = None
        self._epoch: int | None = None
        self.rate_factors: dict[str, float] = {}
        self.stop_signals: StopSignals | None = None
        self._clock: ScheduleClock | None = None
        self._user_groups: list[dict[str, Any]] = []
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of each hook here, 40 times a step: past nn.Module's search for parameters.
        if name in FREQUENT:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        """Builds the network, once, inside the strategy's and precision's initialisation contexts."""
        if getattr(self, "network", None) is None:
            self.network = changed(self.build_network(), self.trainer)
            check_fit(self.network, getattr(self.trainer, "datamodule", None))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns logits (B, T, V)."""
        return self.network.logits(self.network(batch))

    def compute_loss(self, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns what the objective makes of a batch; a strategy that cuts up network or batch replaces it."""
        return self.objective.loss(self.network, batch)

    # -- training ---------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Counts the batch's tokens for the schedule."""
        if self._clock is not None:
            self._clock.count(batch)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns what backward starts from: the mean, or, where it is weighed later, the sum over a constant."""
        self.logging_step = False
        self._epoch = self.current_epoch
        seed_generators(mix(self._seed, self._epoch, batch_idx, place_of(self.trainer)[0]), self.device)
        loss, metrics = self.compute_loss(batch)
        self._window.add({"loss": loss, **metrics})
        if not self._weighs_later:
            mean = loss.mean
            self.step_loss = mean.detach()
            return mean
        sums = wide(torch.stack((loss.total.detach(), loss.tokens)))
        self._step_sums = sums if self._step_sums is None else self._step_sums + sums
        return loss.total / GRADIENT_TOKENS

    @property
    def _weighs_later(self) -> bool:
        # Only then is the number of label tokens of the step unknown at the time of backward.
        return self.in_parts or self.trainer.accumulate_grad_batches > 1 or place_of(self.trainer)[1] > 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Steps the optimizer on gradients that are weighed by tokens before any hook sees them."""

        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure else None
            if self._step_sums is not None:
                self._weigh_gradients(optimizer, self._step_sums)
                self._step_sums = None
            return result

        self._norm = None
        if self._clock is not None:
            self._clock.begin_step()
        with scaled_rates(optimizer, self.rate_factors):
            optimizer.step(closure=closure)
        keep_updates(optimizer)

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the 2-norm of all gradients of the optimizer step, before clipping; 0-d, on the device.

        For `on_before_optimizer_step`. It is computed when it is first asked for in a step, once for all.
        """
        if self._norm is None:
            self._norm = gradient_norm(self.trainer, optimizer)
        return self._norm

    def _weigh_gradients(self, optimizer: Any, sums: Tensor) -> None:
        # backward divided by GRADIENT_TOKENS, Lightning by the micro-batches, the strategy by the ranks
        total, tokens = self._sum_over_ranks(sums).unbind()
        tokens = tokens.clamp(min=1)
        self.step_loss = total / tokens
        parts = self.trainer.accumulate_grad_batches * place_of(self.trainer)[1]
        scale_gradients(self.trainer, optimizer, GRADIENT_TOKENS * parts / tokens.to(torch.float32))

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips as the strategy does, which knows where gradients are, or as Lightning does."""
        clip = getattr(self.trainer.strategy, "clip_gradients", self.clip_gradients)
        clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the figures of the step where it is the turn of one."""
        self.logging_step = not (self.trainer.global_step + 1) % self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.stop_signals is not None:
            self.stop_signals.heed(self.logging_step, self.trainer.strategy.reduce, self.device)
        if not self.logging_step:
            return
        norm = self.gradient_norm(optimizer)
        means, tokens = self._window.means(self._sum_over_ranks)
        self.tokens_seen += tokens
        more = {"tokens": self.tokens_seen, "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm}
        data: Any = getattr(self.trainer, "datamodule", None)
        figures = named("train", means) | {f"train/{name}": float(value) for name, value in more.items()}
        figures |= {f"epoch/{name}": float(count) for name, count in getattr(data, "epochs", dict)().items()}
        # Not self.log: Lightning would walk the figures again after every step that is not logged.
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        )
        self._to_loggers(figures, self.trainer.global_step + 1)
        if self._clock is not None:
            self._clock.agree(self.trainer.strategy.reduce, self.device)

    def _to_loggers(self, figures: dict[str, float], step: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(figures, step=step)

    # -- validation -------------------------------------------------------------------------------

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the validation sums."""
        loss, metrics = self.compute_loss(batch)
        self._validation.add({"loss": loss, **metrics})

    def on_validation_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole validation set and all ranks."""
        figures = named("val", self._validation.means(self._sum_over_ranks)[0])
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(figures, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            self._to_loggers(figures, self.trainer.global_step)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the test sums."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole test set and all ranks."""
        self.log_dict(named("test", self._validation.means(self._sum_over_ranks)[0]))

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns log-probabilities (B, T) in nats of the labels; 0 where the label is ignored."""
        losses = nn.functional.cross_entropy(
            self(batch).float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return -losses.view_as(batch["labels"])

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return sum_over(self.trainer, values)

    # -- optimizer, schedule, state ----------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Builds the optimizer on two parameter groups, and the schedule over the length of the run."""
        optimizer = self.build_optimizer(self.parameter_groups())
        self._user_groups = written_settings(optimizer, self.trainer)
        if self.build_lr_scheduler is None:
            return optimizer
        scheduler = self.build_lr_scheduler(optimizer)
        self._clock = ScheduleClock(scheduler, self.trainer)
        self._clock.bind()
        # To count steps Lightning has built the loader, before it knows the position in a checkpoint: anew.
        self.trainer.fit_loop._combined_loader = None
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the trainable parameters in groups of equal settings; a shared one stands once."""
        return parameter_groups(self, self.decay_embeddings, self.parameter_options)

    def on_fit_start(self) -> None:
        """Notes what a callback may change."""
        self._accumulated = self.trainer.accumulate_grad_batches

    def on_train_start(self) -> None:
        """Gives what the user wrote precedence over the optimizer settings in a checkpoint."""
        listen(self)
        look_once(self.trainer)
        self.resume_training_weights()
        if not self.trainer.ckpt_path:
            return
        optimizer, scheduler = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        prefer_written(optimizer, scheduler, self._user_groups)  # type: ignore[arg-type]
        if self._clock is not None:
            self._clock.bind()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the tokens seen and the sums since the last logged step, of each rank."""
        many, group = place_of(self.trainer)[1] > 1, group_of(self.trainer)
        gather = self.all_gather if many else lambda sums, group: sums
        window = self._window.state_dict(lambda sums: torch.as_tensor(gather(sums, group)))
        self.save_averages(checkpoint)
        checkpoint["language_module"] = {"tokens_seen": self.tokens_seen, "window": window}
        if self._epoch is not None:
            settle(self.trainer, checkpoint, self._epoch, self._accumulated)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` saved."""
        check_weights(self.state_dict(), checkpoint["state_dict"])
        self.load_training_weights(checkpoint)
        if state := checkpoint.get("language_module"):
            self.tokens_seen = state["tokens_seen"]
            rescale(self.trainer, checkpoint)
            self._window.load_state_dict(state["window"], *place_of(self.trainer), self.device)
