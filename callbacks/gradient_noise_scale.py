"""The gradient noise scale: how many tokens a batch is worth having."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from core.contracts import NormsGradients, ScalesLosses
from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.figures import log_figures
from core.training.loss_ranks import dp_size, sum_over
from core.training.seeding import mix
from toolkit.gradient_noise import MeasuresParts, estimate
from toolkit.routing import RoutesTokens
from toolkit.sharded_squares import ShardedSquares
from toolkit.shards import HoldsParts
from toolkit.trials import say

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

LOSS_DIVISOR = 4096.0
"""What the losses of a micro-batch are divided by where they are weighed later; see CONTRIBUTING, "What a callback finds"."""


@technique(
    paper="An Empirical Model of Large-Batch Training, arXiv:1812.06162, equation 2.9 and appendix A.1",
    conflicts={
        "OOMGuard": "it computes micro-batches in parts and repeats them; set data.batch_size to what fits",
    },
    # the halves are computed before others listen to the step, and after the clock has seen the batch come
    before=("SkipStep", "GradientClip", "ActivationMonitor", "AttentionMonitor", "LossBreakdown"),
    after=("StepTime",),
    offers=("gradient_noise_scale",),
    observer=True,
)
class GradientNoiseScale(Callback):
    """Measures the gradient noise scale tr(S) / |G|^2 in tokens, and says which batch it suggests.

    A batch of that many tokens needs twice the steps of a very large one, and half of its tokens. Much smaller batches waste
    steps, much larger ones tokens. |G|^2 and tr(S) are estimated without bias from the norm of the step's gradient and those
    of parts of its batch: of micro-batches, where there are several in a step; else of the halves of the micro-batch on each
    rank, whose gradients are computed besides: the measured step takes twice as long, 1% of the time of 100 steps. Moving
    averages of both are taken before the division, as single estimates are noisy, and may be negative.

    Logged in every `every_n_steps`th optimizer step, once both averages are positive: `noise_scale/tokens`, and
    `noise_scale/batch_ratio`, over the label tokens of the step. Tokens of a row are not independent: the figure counts tokens
    of rows as long as those of the run. Under `DeepSpeedZero` the parts are the micro-batches of each rank, whose gradients are
    measured as backward computes them. Under `FSDP` and `HybridParallel` they are averaged over the ranks in each
    micro-batch, and the parts are those of all ranks; in a measured step over replicas, too, which other steps leave to the
    last micro-batch: its sums are rounded in another order. So are those of a pipeline, which in a measured step runs each
    micro-batch, or each half of a single one, through a schedule of its own: stages wait longer, and nothing is computed twice.
    A measured step with micro-batches takes memory for one more copy of the rank's gradients, except under `DeepSpeedZero`. All
    other steps cost nothing.

    Args:
        every_n_steps: Optimizer steps between two that are measured.
        average: Share of the moving averages that is kept at each measurement, from 0 to below 1.

    Raises:
        ConfigError: If an argument is out of range, or a step cannot be taken apart: one micro-batch under a sharded strategy
            (under `DeepSpeedZero`: on one rank; in a pipeline: whose halves have too few micro-batches for its schedule), in a
            network with experts, or of a single row.

    Example:
        trainer:
          callbacks+:
            - class_path: GradientNoiseScale
              init_args: {every_n_steps: 100}
    """

    def __init__(self, every_n_steps: int = 100, average: float = 0.9) -> None:
        if every_n_steps < 1 or not 0 <= average < 1:
            raise ConfigError(
                "GradientNoiseScale takes every_n_steps >= 1 and average from 0 to below 1, not "
                f"{every_n_steps} and {average}."
            )
        self.every_n_steps, self.average = every_n_steps, average
        self.signal = self.noise = self._batch = 0.0
        self.measurements = 0
        self._squares: ShardedSquares | None = None
        self._sharded = self._flat = self._stages = False
        self._heard: _Heard | None = None
        self._parts: list[tuple[Tensor, Tensor]] | None = None
        self._last: tuple[list[Tensor | None], Tensor] | None = None
        self._whole: Tensor | None = None
        self._staged: list[tuple[Tensor, Tensor]] | None = None

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields that a step of one row has no parts."""
        rows, batches = run.argument("data.batch_size"), run.argument("trainer.accumulate_grad_batches")
        rows = rows * batches if isinstance(rows, int) and isinstance(batches, int) else 2
        if rows < 2:
            yield (
                "a step of one row has no parts to compare: set --data.batch_size or "
                "--trainer.accumulate_grad_batches to 2 or more"
            )

    @property
    def batch_ratio(self) -> float | None:
        """The noise scale over the label tokens of the step that was measured last; None: not known yet."""
        known = self.signal > 0 and self.noise > 0 and self._batch > 0
        return self.noise / self.signal / self._batch if known else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the moving averages."""
        kept = {"signal": self.signal, "noise": self.noise}
        return kept | {"batch": self._batch, "measurements": self.measurements}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues those of a checkpoint."""
        self.signal, self.noise = state_dict["signal"], state_dict["noise"]
        self._batch, self.measurements = state_dict["batch"], state_dict["measurements"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that steps can be taken apart."""
        network: Any = pl_module.network
        self._flat = isinstance(trainer.strategy, HoldsParts)
        self._sharded = isinstance(trainer.strategy, NormsGradients) and not self._flat
        averages = self._sharded or self._flat
        strategy: Any = trainer.strategy
        parts = trainer.accumulate_grad_batches * (trainer.world_size if self._flat else 1)
        staged = strategy.step_parts(parts) if isinstance(strategy, MeasuresParts) else 0
        self._stages = staged > 0
        if (staged or parts) == 1 and (averages or isinstance(network, RoutesTokens)):
            raise ConfigError(self._one_part(strategy, network, averages))
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._trained = list(named.values())
        self._squares = None if self._flat else ShardedSquares({"all": named}, pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to measure with the first micro-batch of a step that is due."""
        if (trainer.global_step + 1) % self.every_n_steps or self._parts is not None:
            return
        self._parts, self._last = [], None
        strategy: Any = trainer.strategy
        self._staged = strategy.measure_parts() if self._stages else None
        if trainer.accumulate_grad_batches == 1 and not self._sharded and not self._flat:
            self._measure_halves(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Listens to backward; lets FSDP sum a micro-batch over replicas at once, which it leaves to the last of a step."""
        if self._parts is not None and self._flat:
            self._heard = _Heard(loss, self._trained)
        if self._parts is not None and self._sharded:
            from torch.distributed.fsdp import FSDPModule

            if isinstance(pl_module, FSDPModule):
                pl_module.set_requires_all_reduce(True)

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Measures what a micro-batch added to the gradients."""
        if self._staged:
            self._take(trainer, self._staged)
        if self._parts is None or self._stages or pl_module.step_sums is None:
            return
        more = is_accumulating(trainer)
        weight = pl_module.step_sums[1].clone()
        if self._heard is not None:
            heard, self._heard = self._heard.end() / trainer.world_size, None
            since = self._last[1] if self._last is not None else torch.zeros_like(weight)
            factor = LOSS_DIVISOR * trainer.accumulate_grad_batches
            self._parts.append((heard * factor**2, weight - since))
            self._last = [], weight
            return
        assert self._squares is not None
        gradients = self._squares.gradients()
        before, since = self._last or (None, torch.zeros_like(weight))
        # without shards, the last backward averages over the ranks all that they had of their own
        if more or self._sharded or trainer.world_size == 1:
            added = gradients if before is None else _difference(gradients, before)
            factor = LOSS_DIVISOR * trainer.accumulate_grad_batches / _loss_scale(trainer)
            factor *= dp_size(trainer) if self._sharded else 1
            self._parts.append((self._squares.sums(added) * factor**2, weight - since))
        kept = [None if g is None else g.detach().clone() for g in gradients] if more else []
        self._last = kept, weight

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Takes the norm of the step's gradient, before it is clipped."""
        if self._parts is not None:
            self._whole = pl_module.gradient_norm(optimizer).double().square()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Estimates signal and noise, and logs."""
        if self._parts is None or self._whole is None:
            return
        parts, whole, last = self._parts, self._whole, self._last
        self._parts = self._last = self._whole = None
        if not parts or last is None:
            return
        squares = torch.cat([square for square, _ in parts])
        weights = torch.stack([weight for _, weight in parts]).to(squares)
        total = sum_over(trainer, last[1].to(squares).clone())
        if self._sharded:
            weights = sum_over(trainer, weights)
        there = weights > 0
        inverse = torch.where(there, 1 / weights.clamp(min=1e-12), 0)
        share = 1 / trainer.world_size
        sums = torch.stack([(squares * inverse**2).sum(), inverse.sum() * share, there.sum() * share])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
        small, inverse_small, number, big, self._batch = torch.stack([*sums, whole.to(sums), total]).tolist()
        if number and self._batch:
            self._add(*estimate(small / number, inverse_small / number, big, 1 / self._batch))
        self.measurements += 1
        if (ratio := self.batch_ratio) is not None:
            tokens = ratio * self._batch
            log_figures(trainer, {"noise_scale/tokens": tokens, "noise_scale/batch_ratio": ratio})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says which batch the last averages suggest."""
        if (ratio := self.batch_ratio) is not None:
            say(
                trainer,
                self,
                f"a batch of about {ratio * self._batch:,.0f} label tokens balances steps and tokens; that of this run "
                f"had {self._batch:,.0f}.",
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forgets a step that breaks off."""
        self._parts = self._last = self._whole = self._staged = None
        if self._heard is not None:
            self._heard.end()
            self._heard = None

    def _add(self, signal: float, noise: float) -> None:
        if math.isfinite(signal) and math.isfinite(noise):  # an overflow of fp16 is no measurement
            # from zero: what is missing at first is the same share of both, and their ratio is logged
            self.signal = self.average * self.signal + (1 - self.average) * signal
            self.noise = self.average * self.noise + (1 - self.average) * noise

    def _one_part(self, strategy: object, network: nn.Module, averages: bool) -> str:
        why = f"{type(network).__name__} counts the tokens of its experts in each forward"
        if self._stages:
            why = f"{type(strategy).__name__} runs all of it through one schedule"
        elif averages:
            why = f"{type(strategy).__name__} averages its gradients over the ranks in backward"
        return (
            f"GradientNoiseScale compares parts of a step, and there is one micro-batch: {why}.\n"
            f"Set --trainer.accumulate_grad_batches=2 (and half of data.batch_size), or leave it out."
        )

    def _take(self, trainer: Trainer, staged: list[tuple[Tensor, Tensor]]) -> None:
        """Takes what stages of a pipeline have measured, each that of all."""
        factor = dp_size(trainer) ** 2 / trainer.world_size
        self._parts = [(square.double().reshape(1) * factor, weight) for square, weight in staged]
        self._last, self._staged = ([], torch.stack([weight for _, weight in staged]).sum()), None

    def _measure_halves(self, trainer: Trainer, pl_module: Any, batch: Mapping[str, Any]) -> None:
        """Computes the gradients of both halves of a micro-batch, beside those of the step."""
        assert self._squares is not None
        assert self._parts is not None
        rows = len(batch["input_ids"])
        if rows < 2:  # a schedule of batch sizes is at its smallest: there is nothing to compare
            return
        parameters = [p for p in pl_module.network.parameters() if p.requires_grad]
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices), trainer.precision_plugin.train_step_context():
            torch.manual_seed(mix(pl_module.seed, trainer.global_step, trainer.global_rank))
            for some in (slice(rows // 2), slice(rows // 2, rows)):
                loss, _ = pl_module.compute_loss({name: value[some] for name, value in batch.items()})
                found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
                self._parts.append((self._squares.sums(found), loss.weight.detach().double()))
        self._last = [], torch.stack([weight for _, weight in self._parts]).sum()


class _Heard:
    """Norms of the gradients of one backward on this rank, before a strategy reduces them.

    Args:
        loss: Of which backward is about to run; its own gradient is the scale of all.
        parameters: Those that are trained.
    """

    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        self._norms: list[Tensor] = []
        self._scale: list[Tensor] = []
        self._handles = [parameter.register_hook(self._hear) for parameter in parameters]
        self._handles.append(loss.register_hook(self._scale.append))

    def _hear(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def end(self) -> Tensor:
        """Stops listening; returns the sum of squares, (1,)."""
        for handle in self._handles:
            handle.remove()
        if not self._norms:
            return torch.zeros(1, dtype=torch.float64)
        squares = torch.stack(self._norms).double().square().sum()
        return (squares / self._scale[0].double().square()).reshape(1)


def _difference(now: list[Tensor | None], before: list[Tensor | None]) -> list[Tensor | None]:
    return [a if a is None or b is None else a - b for a, b in zip(now, before, strict=True)]


def _loss_scale(trainer: Trainer) -> float:
    precision: Any = trainer.precision_plugin
    scaled = isinstance(precision, ScalesLosses) and precision.scaler is not None
    return float(precision.scaler.get_scale()) if scaled else 1.0
