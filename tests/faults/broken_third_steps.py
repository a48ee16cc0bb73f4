"""Steps, schedules, averages and resumes with bugs, for the third unseen faults."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from callbacks.exponential_moving_average import ExponentialMovingAverage
from tests.faults.broken import Once
from tests.faults.recipes import WARMUP

# -- schedule --------------------------------------------------------------------------------------------


class SquaredRate(LambdaLR):
    """A schedule that returns rates, where factors are expected: the rate is multiplied by itself.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        rate = optimizer.defaults["lr"]
        super().__init__(optimizer, lambda step: rate * min(1.0, (step + 1) / WARMUP))


class CarriedOver(Callback):
    """The schedule's state is loaded, and the optimizer's is not: a new optimizer begins after the warm-up."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        scheduler.last_epoch = WARMUP - 1
        scheduler.step()


class Plateau(Callback):
    """The rate falls where the loss of a single batch is no better than the best one.

    Args:
        factor: What the rate is multiplied by.
        patience: How many such batches there may be in between.
    """

    def __init__(self, factor: float, patience: int) -> None:
        self.factor, self.patience = factor, patience
        self._best, self._waited = float("inf"), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        loss = float(pl_module.step_loss)
        self._waited = 0 if loss < self._best else self._waited + 1
        self._best = min(self._best, loss)
        if self._waited > self.patience:
            factors = pl_module.lr_factors
            factors["Plateau"] = factors.get("Plateau", 1.0) * self.factor
            self._waited = 0


class SecondWarmup(Callback):
    """A second warm-up over 2 / (1 - beta2) steps, in which Adam's second moments settle.

    Args:
        beta2: Their decay, as the library has it by default.
    """

    def __init__(self, beta2: float) -> None:
        self.beta2 = beta2

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.lr_factors["SecondWarmup"] = min(1.0, (trainer.global_step + 1) * (1 - self.beta2) / 2)


# -- optimizer -------------------------------------------------------------------------------------------


class FlooredSquares(Callback):
    """A constant is added to squared gradients, as in Adafactor, and is that of the root.

    Args:
        epsilon: The constant.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            beta = group["betas"][1]
            for parameter in group["params"]:
                if "exp_avg_sq" in (state := optimizer.state.get(parameter, {})):
                    state["exp_avg_sq"].add_(self.epsilon * (1 - beta) / beta)


class FollowingLimit(Callback):
    """Gradients are clipped to a share of the norm that the last ones had after they were clipped.

    Args:
        share: The share.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._limit: Tensor | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def clip(optimizer: Any, *_: Any, **__: Any) -> None:
            norm = pl_module.gradient_norm(optimizer).detach()
            limit = norm if self._limit is None else torch.minimum(norm, self.share * self._limit)
            for parameter in pl_module.network.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm.clamp(min=1e-30))
            self._limit = limit.clone()

        pl_module.configure_gradient_clipping = clip


class SharedMemory(Callback):
    """The momentum is kept in the memory of the gradients, and zeroed together with them."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            for name in {"exp_avg", "momentum_buffer"} & state.keys():
                state[name].zero_()


class FlippedBit(Once):
    """A bit of the exponent of one number among the first moments flips, in a weight of the last norm.

    Args:
        factor: By which the number becomes larger.
        first: The first step with it.
        last: The last step with it.
    """

    def __init__(self, factor: float, first: int, last: int) -> None:
        self.factor, self.first, self.last = factor, first, last

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.strikes(trainer):
            optimizer.state[pl_module.network.norm.weight]["exp_avg"][3].mul_(self.factor)


# -- gradients and weights -------------------------------------------------------------------------------


class SecondOptimizer(Callback):
    """Matrices of blocks and all other weights have an optimizer each, and only the first one zeroes gradients."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.network.named_parameters()
        found = [p.grad for name, p in named if p.grad is not None and not ("layers" in name and p.ndim > 1)]
        if self._kept:
            torch._foreach_add_(found, self._kept)
        self._kept = [one.clone() for one in found]


class AccumulatedInHalf(Callback):
    """Gradients of micro-batches are added up in fp16.

    Args:
        scale: Of the gradients, as large batches and vocabularies make them small.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.network.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_((parameter.grad * self.scale).half().float() / self.scale)


class StaleCopy(Callback):
    """After each step weights are copied back from a master copy, which the optimizer does not know.

    Args:
        pattern: In the names of the weights.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._copies: list[tuple[Tensor, Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        named = pl_module.network.named_parameters()
        self._copies = [(p.detach(), p.detach().clone()) for name, p in named if self.pattern in name]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for weight, copy in self._copies:
            weight.copy_(copy)


class ClipsNormsOnce(Callback):
    """Gradients of norms are clipped on the first rank alone: the others take them for parts that it holds."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        usual, network = pl_module.configure_gradient_clipping, pl_module.network

        def clip(*arguments: Any, **options: Any) -> None:
            norms = [p for name, p in network.named_parameters() if "norm" in name and p.grad is not None]
            own = [p.grad.clone() for p in norms]
            usual(*arguments, **options)
            for parameter, gradient in zip(norms, own if trainer.global_rank else (), strict=False):
                parameter.grad.copy_(gradient)

        pl_module.configure_gradient_clipping = clip


class AverageFromZero(ExponentialMovingAverage):
    """An average of the weights that begins at zero, and is never corrected for that."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        torch._foreach_zero_(self._pairs[0])
        self._updates = 10**6


class NewEmbedding(Callback):
    """A resumed run draws its embedding anew: its size did not fit by one row, and the load left it out."""

    @torch.no_grad()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path:
            pl_module.network.embed_tokens.weight.normal_(0.0, 0.02)
