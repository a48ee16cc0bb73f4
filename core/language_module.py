"""What is trained: a network, an objective, an optimizer and a schedule, put together for Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import CountsEpochs, Network, Objective, TokenSum
from core.contracts.modules import check_fit, divisor
from core.lightning_compat import NAME_OF_HOOK, forget_loader
from core.training import loss_ranks as ranks
from core.training import optimizer_state, stopping, validation_steps
from core.training.averaged_weights import AveragedWeights
from core.training.every_step import cache_step_lookups
from core.training.figures import log_figures
from core.training.loop_state import convert_batch_counts, normalize_loops
from core.training.network_changes import apply_network_changes
from core.training.parameter_groups import parameter_groups
from core.training.scheduling import ScheduleClock, scaled_lrs
from core.training.seeding import mix, seed_generators
from core.training.token_sums import TokenSums, named, to_float64
from core.training.weights import check_weights

GRADIENT_TOKENS = 4096.0
"""Divides summed losses before backward. A power of two: it changes exponents and rounds nothing."""

_OFTEN = {NAME_OF_HOOK, "logging_step", "stepping", "_epoch", "step_loss", "step_sums", "_norm", "in_parts"}
"""Attributes that are set in every step, and are no modules, parameters or buffers."""


class LanguageModule(AveragedWeights):
    """Trains a network so that every label token of a global batch weighs the same.

    Gradients are those of the sum of all token losses over the number of label tokens, counted over
    micro-batches and ranks, however unevenly the tokens are distributed. torch's generators are seeded
    before each micro-batch from (seed, epoch, batch, rank): what other techniques draw does not
    change the training, and a resumed run needs no generator state.

    Logged every `trainer.log_every_n_steps` optimizer steps, over all tokens since the last time:
    `train/loss` (in the objective's `loss_unit`), `train/perplexity` (of losses in nats per token), `train/tokens` (label
    tokens since the start of the run), `train/lr`, `train/grad_norm` (before clipping), `epoch/NAME` (how often each source
    of the data has been gone through, where the data module has `epochs`); after validation `val/loss` and `val/perplexity`.
    Other steps never wait for the device.

    Args:
        network: What is trained; built in `configure_model`, so that strategies can shard it.
        objective: What is minimised.
        optimizer: Called with parameter groups. Norms and biases (parameters of fewer than two
            dimensions) come in a group with `weight_decay` 0.
        lr_scheduler: Called with the optimizer and stepped after each optimizer step.
        decay_embeddings: Whether embedding weights (tied output weights too) are decayed.
        parameter_options: Pattern of parameter names -> settings of the optimizer that hold for them instead,
            such as {"*.q_proj.weight": {weight_decay: 0.0}}; `*` matches anything, later patterns win.
        weights: A checkpoint, run folder, Hugging Face folder, safetensors or GGUF file, whose weights alone the run
            starts from. A run that resumes a checkpoint takes the checkpoint's in their place.

    Attributes:
        logging_step: True from the optimizer step until the end of a batch whose figures are logged.
        stepping: True while an optimizer step is made, until the optimizer has changed the weights.
        tokens_seen: Label tokens of all ranks since the start of the run, as of the last logged step.
        step_loss: Mean loss over all label tokens of the optimizer step, of all ranks; 0-d, on the device. From
            `on_before_optimizer_step` of the step on.
        in_parts: Whether a callback computes micro-batches in parts, each with a `training_step`.
        fits: Whether network and data are known to fit; otherwise `configure_model` checks it.
        lr_factors: Who -> what the schedule's learning rates are multiplied by, in the coming steps.
        seed: What torch's generators are seeded from, with epoch, batch and rank; `seed_everything` of the run.
        train_sums: Losses and other figures of this rank since the last logged step.
        step_sums: Loss and weight of this rank's micro-batches of the step so far, (2,); None: of none.
        schedule_clock: Counts tokens for the schedule; None: there is no schedule, or it is on hold.
        written_groups: Settings of the optimizer's parameter groups, as configured.
        loss_ranks: What the strategy offers, since `setup`; see `core.training.loss_ranks`.
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
        weights: str | None = None,
    ) -> None:
        super().__init__()
        self.build_network, self.objective, self.weights = network, objective, weights
        self.build_optimizer, self.build_lr_scheduler = optimizer, lr_scheduler
        self.decay_embeddings, self.parameter_options = decay_embeddings, parameter_options or {}
        self.logging_step = self.in_parts = self.stepping = self.fits = False
        self.tokens_seen = 0
        self.train_sums, self._validation = TokenSums(), TokenSums()
        self.step_loss: Tensor | None = None
        self.step_sums: Tensor | None = None
        self._norm: Tensor | None = None
        self._epoch: int | None = None
        self.lr_factors: dict[str, float] = {}
        self.stop_signals: stopping.StopSignals | None = None
        self.schedule_clock: ScheduleClock | None = None
        self.written_groups: list[dict[str, Any]] = []
        self._built = Optimizer
        self._checkpoints_groups: list[dict[str, Any]] | None = None
        self.loss_ranks: ranks.LossRanks | None = None
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of each hook here, 40 times a step: past nn.Module's search for parameters.
        if name in _OFTEN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def setup(self, stage: str | None = None) -> None:
        """Asks once what the strategy offers, as processes are connected now; forgets a step that an error broke off."""
        self.loss_ranks, self.step_sums = ranks.LossRanks(self.trainer), None

    def configure_model(self) -> None:
        """Builds the network, once, inside the strategy's and precision's initialisation contexts."""
        if getattr(self, "network", None) is None:
            self.network = apply_network_changes(self.build_network(), self.trainer, self.weights)
            self.fits = self.fits or check_fit(self.network, getattr(self.trainer, "datamodule", None))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns logits (B, T, V)."""
        return self.network.logits(self.network(batch))

    def compute_loss(self, batch: Mapping[str, Tensor]) -> tuple[TokenSum, dict[str, TokenSum]]:
        """Returns what the objective makes of a batch; a strategy that cuts up network or batch replaces it."""
        return self.objective.loss(self.network, batch)

    # -- training ---------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Counts the batch's tokens for the schedule."""
        if self.schedule_clock is not None:
            self.schedule_clock.count(batch)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns what backward starts from: the mean, or, where it is weighed later, the sum over a constant."""
        self.logging_step, self._epoch = False, self.current_epoch
        seed_generators(mix(self.seed, self._epoch, batch_idx, ranks.dp_rank(self.trainer)), self.device)
        loss, metrics = self.compute_loss(batch)
        self.train_sums.add({"loss": loss, **metrics})
        if not self._weighs_later:
            mean = loss.mean
            self.step_loss = mean.detach()
            return mean
        sums = to_float64(torch.stack((loss.total.detach(), loss.weight.detach())))
        self.step_sums = sums if self.step_sums is None else self.step_sums + sums
        return loss.total / GRADIENT_TOKENS

    @property
    def _weighs_later(self) -> bool:
        # Only then is the number of label tokens of the step unknown at the time of backward.
        return self.in_parts or self.trainer.accumulate_grad_batches > 1 or ranks.dp_size(self.trainer) > 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Steps the optimizer on gradients that are weighed by tokens before any hook sees them."""

        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure else None
            if self.step_sums is not None:
                self._weigh_gradients(optimizer, self.step_sums)
                self.step_sums = None
            return result

        self._norm = None
        if self.schedule_clock is not None:
            self.schedule_clock.begin_step()
        self.stepping = True
        try:
            with scaled_lrs(optimizer, self.lr_factors):
                optimizer.step(closure=closure)
        finally:
            self.stepping = False

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the 2-norm of all gradients of the optimizer step, before clipping; 0-d, on the device.

        For `on_before_optimizer_step`. It is computed when it is first asked for in a step, once for all.
        """
        if self._norm is None:
            self._norm = ranks.gradient_norm(self.trainer, optimizer)
        return self._norm

    def _weigh_gradients(self, optimizer: Any, sums: Tensor) -> None:
        # backward divided by GRADIENT_TOKENS, Lightning by the micro-batches, the strategy by the ranks
        total, weight = self.sum_over_ranks(sums).unbind()
        weight = divisor(weight)
        self.step_loss = total / weight
        parts = self.trainer.accumulate_grad_batches * ranks.dp_size(self.trainer)
        ranks.scale_gradients(self.trainer, optimizer, GRADIENT_TOKENS * parts / weight.to(torch.float32))

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips as the strategy does, which knows where gradients are, or as Lightning does."""
        clip = ranks.offers_of(self.trainer).clip or self.clip_gradients
        clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the figures of the step where it is the turn of one."""
        self.logging_step = not (self.trainer.global_step + 1) % self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.stop_signals is not None:
            self.stop_signals.poll(self.logging_step, self.trainer.strategy.reduce, self.device)
        if not self.logging_step:
            return
        norm = self.gradient_norm(optimizer)
        means, tokens = self.train_sums.means(self.sum_over_ranks)
        self.tokens_seen += tokens
        more = {"tokens": self.tokens_seen, "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm}
        data: Any = getattr(self.trainer, "datamodule", None)
        figures = named("train", self.objective, means, more)
        if isinstance(data, CountsEpochs):
            figures |= {f"epoch/{name}": float(count) for name, count in data.epochs().items()}
        log_figures(self.trainer, figures)
        if self.schedule_clock is not None:
            self.schedule_clock.agree(self.trainer.strategy.reduce, self.device)

    # -- validation -------------------------------------------------------------------------------

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the validation sums."""
        loss, metrics = self.compute_loss(batch)
        self._validation.add({"loss": loss, **metrics})

    def on_validation_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole validation set and all ranks."""
        figures = named("val", self.objective, self._validation.means(self.sum_over_ranks)[0], {})
        fitting = self.trainer.state.fn == "fit"
        # Not False: Lightning would not return and print them either. Not True, of which it warns without a logger.
        self.log_dict(figures, logger=False if fitting else None)
        if fitting and not self.trainer.sanity_checking:
            log_figures(self.trainer, figures)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the test sums."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole test set and all ranks."""
        self.log_dict(named("test", self.objective, self._validation.means(self.sum_over_ranks)[0], {}))

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns log-probabilities (B, T) in nats of the labels; 0 where the label is ignored."""
        losses = nn.functional.cross_entropy(
            self(batch).float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return -losses.view_as(batch["labels"])

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sums values over the ranks that have different tokens, in place; called on every rank."""
        return ranks.sum_over(self.trainer, values)

    # -- optimizer, schedule, state ----------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Builds the optimizer on two parameter groups, and the schedule over the length of the run."""
        optimizer = self.build_optimizer(self.parameter_groups())
        self._built = type(optimizer)
        self.written_groups = optimizer_state.written_settings(optimizer, self.trainer)
        if self.build_lr_scheduler is None:
            return optimizer
        scheduler = self.build_lr_scheduler(optimizer)
        self.schedule_clock = ScheduleClock(scheduler, self.trainer)
        self.schedule_clock.bind()
        # Lightning has built the loader to count steps, before it knows the position in a checkpoint: build it again.
        forget_loader(self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the trainable parameters in groups of equal settings; a shared one is listed once."""
        return parameter_groups(self, self.decay_embeddings, self.parameter_options)

    def on_fit_start(self) -> None:
        """Notes what a callback may change, and counts the steps between validations."""
        validation_steps.validate_in_steps(self.trainer)
        self._accumulated = self.trainer.accumulate_grad_batches

    def on_train_start(self) -> None:
        """Gives what the user wrote precedence over the optimizer settings in a checkpoint."""
        validation_steps.check_epoch(self.trainer)
        stopping.listen(self)
        cache_step_lookups(self.trainer)
        if self.trainer.ckpt_path:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            scheduler: Any = self.lr_schedulers()
            groups = self.written_groups, self._checkpoints_groups
            optimizer_state.prefer_written(optimizer, scheduler, *groups, self._built)
            if self.schedule_clock is not None:
                self.schedule_clock.bind()
        self.resume_training_weights()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the tokens seen and the sums since the last logged step, of each rank."""
        many, group = ranks.dp_size(self.trainer) > 1, ranks.dp_group(self.trainer)
        gather = self.all_gather if many else lambda sums, group: sums
        window = self.train_sums.state_dict(lambda sums: torch.as_tensor(gather(sums, group)))
        self.save_averages(checkpoint)
        checkpoint["language_module"] = {"tokens_seen": self.tokens_seen, "window": window}
        checkpoint["language_module"]["groups"] = optimizer_state.storable(self.written_groups)
        if self._epoch is not None:
            normalize_loops(self.trainer, checkpoint, self._epoch, self._accumulated)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` saved."""
        check_weights(self.state_dict(), checkpoint["state_dict"])
        self._saved_in_training = checkpoint.get("weights_in_training")
        if state := checkpoint.get("language_module"):
            self.tokens_seen = state["tokens_seen"]
            self._checkpoints_groups = state.get("groups")
            convert_batch_counts(self.trainer, checkpoint)
            place = ranks.dp_rank(self.trainer), ranks.dp_size(self.trainer)
            self.train_sums.load_state_dict(state["window"], *place, self.device)
