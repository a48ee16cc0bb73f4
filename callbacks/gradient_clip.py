"""Limits gradients: their norm, their values, or the outliers among their norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from core.contracts import ClipsGradients
from core.errors import ConfigError, nearest
from core.technique import technique
from core.training.loss_ranks import scale_gradients
from core.training.shards import gradients, local_tensors
from toolkit.shards import HoldsParts

Method = Literal["norm", "value", "adaptive"]
EPS = 1e-6
"""Added to divisors, as in torch's clip_grad_norm_ and in ZClip."""


@technique(
    paper="Pascanu et al., arXiv:1211.5063 (norm); ZClip, arXiv:2504.02507: alpha 0.97, z 2.5, 25 steps (adaptive)",
    owns=("gradient_clipping",),
    after=("SkipStep",),
)
class GradientClip(Callback):
    """Clips gradients by norm, by value or adaptively (ZClip), once for each optimizer step, before the update.

    The gradients are those of the step: of all micro-batches and ranks. "norm" scales them so that their 2-norm is at
    most `limit`. "value" clamps each element to [-limit, limit]. "adaptive" is ZClip: it tracks mean and standard
    deviation of the norm; a norm of z* > `z` deviations above the mean is scaled to mean + z^2 / z* deviations. The host
    does not wait for the device. `train/grad_norm` is the norm before clipping.

    Args:
        method: "norm", "value" or "adaptive", see above.
        limit: Largest 2-norm, or largest absolute value of an element; in "adaptive" an additional largest norm, or None.
        alpha: In "adaptive", how much of mean and variance is kept in each step.
        z: In "adaptive", deviations above the mean from which on a norm is clipped.
        warmup_steps: In "adaptive", steps whose norms make the first mean and variance; no outlier is looked for.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          gradient_clip_val: null
          callbacks+:
            - class_path: GradientClip
              init_args: {method: adaptive, limit: 1.0}
    """

    def __init__(
        self,
        method: Method = "norm",
        limit: float | None = 1.0,
        alpha: float = 0.97,
        z: float = 2.5,
        warmup_steps: int = 25,
    ) -> None:
        if method not in get_args(Method):
            hint = nearest(method, get_args(Method))
            raise ConfigError(
                f"GradientClip: method is {method!r}, not one of {', '.join(get_args(Method))}.{hint}"
            )
        if not (limit is None and method == "adaptive") and not (limit or 0) > 0:
            raise ConfigError(f"GradientClip takes a limit above 0, not {limit}.")
        if not 0 <= alpha < 1 or not z > 0 or warmup_steps < 2:
            raise ConfigError(
                "GradientClip takes alpha from 0 to below 1, z above 0 and warmup_steps from 2 upwards, "
                f"not {alpha}, {z} and {warmup_steps}."
            )
        self.method, self.limit = method, limit
        self.alpha, self.z, self.warmup_steps = alpha, z, warmup_steps
        self._clamp: Callable[..., None] | None = None
        self._steps = 0
        self._norms = torch.zeros(warmup_steps if method == "adaptive" else 0)
        self._mean = self._variance = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics of "adaptive"."""
        state = {"steps": self._steps, "norms": self._norms.cpu().clone()}
        return state | {"mean": float(self._mean), "variance": float(self._variance)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the statistics, unless the warm-up had another length."""
        if state_dict["norms"].shape == self._norms.shape:
            device, self._steps = self._norms.device, state_dict["steps"]
            values = (torch.as_tensor(state_dict[name]) for name in ("norms", "mean", "variance"))
            self._norms, self._mean, self._variance = (value.to(device, copy=True) for value in values)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Moves the statistics to the device; asks the strategy whether it keeps gradients where parameters do not show them."""
        statistics = self._norms, self._mean, self._variance
        self._norms, self._mean, self._variance = (value.to(pl_module.device) for value in statistics)
        strategy: Any = trainer.strategy
        keeps = isinstance(strategy, HoldsParts) and isinstance(strategy, ClipsGradients)
        self._clamp = strategy.clip_gradients if keeps else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Clips."""
        if self.method == "value":
            assert self.limit is not None
            if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                pl_module.gradient_norm(optimizer)  # to be logged as it is now
            if self._clamp is not None:
                self._clamp(optimizer, self.limit, "value")
                return
            own = local_tensors(gradients(optimizer))
            torch._foreach_clamp_min_(own, -self.limit)
            torch._foreach_clamp_max_(own, self.limit)
            return
        norm = pl_module.gradient_norm(optimizer)
        scale = torch.ones_like(norm) if self.limit is None else self.limit / (norm + EPS)
        if self.method == "adaptive":
            scale = torch.minimum(scale, self._usual(norm) / (norm + EPS))
        scale_gradients(trainer, optimizer, scale.clamp(max=1.0))

    def _usual(self, norm: Tensor) -> Tensor:
        """Returns the norm after ZClip, and updates the statistics."""
        norm = norm.float()
        self._steps += 1
        if self._steps <= self.warmup_steps:
            self._norms[self._steps - 1] = torch.where(norm.isfinite(), norm, torch.nan)
            if self._steps == self.warmup_steps:
                self._mean = self._norms.nanmean()
                self._variance = (self._norms - self._mean).square().nanmean()
            return norm
        deviation = self._variance.sqrt()
        z = (norm - self._mean) / (deviation + EPS)
        usual = torch.where(z > self.z, self._mean + self.z**2 / z * deviation, norm)
        mean = self.alpha * self._mean + (1 - self.alpha) * usual
        variance = self.alpha * self._variance + (1 - self.alpha) * (usual - mean).square()
        finite = norm.isfinite()  # fp16 overflows while its loss scale is being found
        self._mean = torch.where(finite, mean, self._mean)
        self._variance = torch.where(finite, variance, self._variance)
        return usual
