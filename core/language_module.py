"""What is trained: a network, an objective, an optimizer and a schedule, put together for Lightning."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import Network, Objective, Schedule, misfits
from core.errors import ConfigError
from core.seeding import mix, seed_generators
from core.sigterm import SharedSigterm
from core.token_sums import TokenSums

GRADIENT_TOKENS = 4096.0
"""Divides summed losses before backward. A power of two: it changes exponents and rounds nothing."""


class LanguageModule(LightningModule):
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

    Attributes:
        logging_step: True from the optimizer step until the end of a batch whose figures are logged.
        tokens_seen: Label tokens of all ranks since the start of the run, as of the last logged step.
    """

    network: Network

    def __init__(
        self,
        network: Callable[[], Network],
        objective: Objective,
        optimizer: Callable[[Any], Optimizer],
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        decay_embeddings: bool = True,
    ) -> None:
        super().__init__()
        self.build_network = network
        self.objective = objective
        self.build_optimizer = optimizer
        self.build_lr_scheduler = lr_scheduler
        self.decay_embeddings = decay_embeddings
        self.logging_step = False
        self.tokens_seen = 0
        self._window = TokenSums()
        self._validation = TokenSums()
        self._step_tokens: Tensor | None = None
        self._sigterm: SharedSigterm | None = None
        self._user_groups: list[dict[str, Any]] = []
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of each hook here, 40 times a step: past nn.Module's search for parameters.
        if name in ("_current_fx_name", "logging_step"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        """Builds the network, once, inside the strategy's and precision's initialisation contexts."""
        if getattr(self, "network", None) is None:
            self.network = self.build_network()
            self.check_against_data(self.network, getattr(self.trainer, "datamodule", None))

    def check_against_data(self, network: Network, data: Any) -> None:
        """Raises a ConfigError where a network is too small for what is known of the data."""
        tokens = getattr(data, "vocab_size", None) or getattr(
            getattr(data, "tokenizer", None), "vocab_size", None
        )
        sizes = network.vocab_size, network.max_sequence_length
        if faults := list(misfits(*sizes, tokens, getattr(data, "sequence_length", None))):
            raise ConfigError("\n".join(faults))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns logits (B, T, V)."""
        return self.network.logits(self.network(batch))

    # -- training ---------------------------------------------------------------------------------

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns what backward starts from: the mean, or the sum over a constant where it is weighed later."""
        self.logging_step = False
        seed_generators(mix(self._seed, self.current_epoch, batch_idx, self.global_rank), self.device)
        loss, metrics = self.objective.loss(self.network, batch)
        self._window.add({"loss": loss, **metrics})
        if not self._weighs_later:
            return loss.mean
        tokens = loss.tokens.detach()
        self._step_tokens = tokens if self._step_tokens is None else self._step_tokens + tokens
        return loss.total / GRADIENT_TOKENS

    @property
    def _weighs_later(self) -> bool:
        # Only then is the number of label tokens of the step unknown at the time of backward.
        return self.trainer.accumulate_grad_batches > 1 or self.trainer.world_size > 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Steps the optimizer on gradients that are weighed by tokens before any hook sees them."""

        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure else None
            if self._step_tokens is not None:
                self._weigh_gradients(optimizer, self._step_tokens)
                self._step_tokens = None
            return result

        optimizer.step(closure=closure)

    def _weigh_gradients(self, optimizer: Any, tokens: Tensor) -> None:
        # backward divided by GRADIENT_TOKENS, Lightning by the micro-batches, the strategy by the ranks
        tokens = self._sum_over_ranks(tokens)
        divided_by = GRADIENT_TOKENS * self.trainer.accumulate_grad_batches * self.trainer.world_size
        factor = divided_by / tokens.clamp(min=1).to(torch.float32)
        torch._foreach_mul_(_gradients(optimizer), factor)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the figures of the step where it is the turn of one."""
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self.logging_step = True
        norm = nn.utils.get_total_norm(_gradients(optimizer))
        means, tokens = self._window.means(self._sum_over_ranks)
        self.tokens_seen += tokens
        figures = _named("train", means)
        figures["train/tokens"] = float(self.tokens_seen)
        figures["train/lr"] = float(optimizer.param_groups[0]["lr"])
        figures["train/grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        epochs = getattr(getattr(self.trainer, "datamodule", None), "epochs", dict)
        figures |= {f"epoch/{name}": float(count) for name, count in epochs().items()}
        # Not self.log: Lightning would walk the figures again after every step that is not logged.
        self.trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        )
        self._to_loggers(figures, self.trainer.global_step + 1)
        if self._sigterm is not None:
            self._sigterm.agree(self._sum_over_ranks, self.device)

    def _to_loggers(self, figures: dict[str, float], step: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(figures, step=step)

    # -- validation -------------------------------------------------------------------------------

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the validation sums."""
        loss, metrics = self.objective.loss(self.network, batch)
        self._validation.add({"loss": loss, **metrics})

    def on_validation_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole validation set and all ranks."""
        figures = _named("val", self._validation.means(self._sum_over_ranks)[0])
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(figures, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            self._to_loggers(figures, self.trainer.global_step)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the test sums."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Logs the token-weighted means over the whole test set and all ranks."""
        self.log_dict(_named("test", self._validation.means(self._sum_over_ranks)[0]))

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns log-probabilities (B, T) in nats of the labels; 0 where the label is ignored."""
        losses = nn.functional.cross_entropy(
            self(batch).float().flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return -losses.view_as(batch["labels"])

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return (
            self.trainer.strategy.reduce(values, reduce_op="sum") if self.trainer.world_size > 1 else values
        )

    # -- optimizer, schedule, state ----------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Builds the optimizer on two parameter groups, and the schedule over the length of the run."""
        optimizer = self.build_optimizer(self.parameter_groups())
        self._user_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        if self.build_lr_scheduler is None:
            return optimizer
        scheduler = self.build_lr_scheduler(optimizer)
        self._bind(scheduler)
        # To count the steps of an epoch Lightning has built the loader, before it knows the position in a
        # checkpoint, and would not tell it: it must build it anew.
        self.trainer.fit_loop._combined_loader = None
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the decayed and the undecayed trainable parameters; a shared one stands once."""
        embeddings = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        decayed: list[Tensor] = []
        undecayed: list[Tensor] = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                kept = parameter.ndim < 2 or (id(parameter) in embeddings and not self.decay_embeddings)
                (undecayed if kept else decayed).append(parameter)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def _bind(self, scheduler: LRScheduler) -> None:
        if isinstance(scheduler, Schedule):
            steps = self.trainer.estimated_stepping_batches
            if math.isinf(steps):
                raise ConfigError("The schedule has to know the length of the run: set --trainer.max_steps.")
            scheduler.bind(int(steps))

    def on_train_start(self) -> None:
        """Gives what the user wrote precedence over the optimizer settings in a checkpoint."""
        self._sigterm = SharedSigterm(self.trainer) if self.trainer.world_size > 1 else None
        if not self.trainer.ckpt_path:
            return
        optimizer, scheduler = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        for group, written in zip(optimizer.param_groups, self._user_groups, strict=True):  # type: ignore[union-attr]
            rate = group["lr"]
            group.update(written)
            if scheduler is not None and not isinstance(scheduler, Schedule):
                group["lr"] = rate  # torch's schedules derive the next rate from the present one
        if isinstance(scheduler, Schedule):
            self._bind(scheduler)

    def _check_weights(self, saved: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        for name in [*own, *saved]:
            here, there = (tuple(d[name].shape) if name in d else "absent" for d in (own, saved))
            if here != there:
                raise ConfigError(
                    f"The checkpoint holds another network: {name} is {there} there and {here} here.\n"
                    "Give the network the checkpoint's arguments, or leave them out: what you do not write is "
                    "taken from the checkpoint."
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the tokens seen and the sums since the last logged step, of each rank."""
        many = self.trainer.world_size > 1
        window = self._window.state_dict(
            lambda sums: torch.as_tensor(self.all_gather(sums)) if many else sums
        )
        checkpoint["language_module"] = {"tokens_seen": self.tokens_seen, "window": window}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` saved."""
        self._check_weights(checkpoint["state_dict"])
        if state := checkpoint.get("language_module"):
            self.tokens_seen = state["tokens_seen"]
            place = (self.global_rank, self.trainer.world_size, self.device)
            self._window.load_state_dict(state["window"], *place)


def _gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _named(stage: str, means: Mapping[str, float]) -> dict[str, float]:
    figures = {f"{stage}/{name}": value for name, value in means.items()}
    figures[f"{stage}/perplexity"] = math.exp(min(means["loss"], 700.0))
    return figures
