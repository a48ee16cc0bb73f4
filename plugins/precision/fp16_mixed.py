"""Matrix products in fp16 with loss scaling, on every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from core.errors import ConfigError
from core.lightning_compat import after_closure
from core.technique import technique
from plugins.precision.layers import run_device


@technique(
    paper="Mixed Precision Training, arXiv:1710.03740, section 3.2; torch.amp.GradScaler",
    conflicts={"LBFGS": "it evaluates the loss several times a step, loss scaling allows one evaluation"},
    precision_words=("16", "16-mixed"),
)
class FP16Mixed(MixedPrecision):
    """Mixed precision in fp16: autocast, weights in float32, and a loss scale that keeps gradients in range.

    The loss is multiplied by a scale before backward, and gradients are divided by it before they are logged or
    clipped. A step whose gradients overflow is skipped and the scale shrinks. After `growth_interval` steps without
    an overflow the scale grows. `trainer.precision: 16-mixed` selects this with its defaults. On a CPU it is for
    trying out what a GPU will do: bf16-mixed is faster there.

    A skipped step counts as a step of the schedule. With a fused Adam or AdamW the decision is taken on the
    device; with other optimizers the host waits for it once per step.

    Args:
        init_scale: The scale of the first step.
        growth_factor: Factor by which the scale grows, above 1.
        backoff_factor: Factor by which the scale shrinks, between 0 and 1.
        growth_interval: Steps without an overflow after which the scale grows.

    Attributes:
        scaler: The `torch.amp.GradScaler`; its state is part of each checkpoint.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        trainer:
          plugins+:
            - class_path: FP16Mixed
              init_args: {init_scale: 65536.0, growth_interval: 2000}
    """

    scaler: torch.amp.GradScaler

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._options = (init_scale, growth_factor, backoff_factor, growth_interval)
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ConfigError(
                "FP16Mixed takes init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and "
                "growth_interval >= 1, not {}, {}, {} and {}.".format(*self._options)
            )
        # `connect` sets the run's device and makes its scaler
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", *self._options))

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Makes the scaler for the run's device; fused Adam kernels skip a step by themselves."""
        self.device = run_device(model)
        self.scaler = torch.amp.GradScaler(self.device, *self._options)
        for optimizer in optimizers:
            # Not SGD: if its first step is skipped, the fused SGD of torch 2.15 continues with uninitialised momentum.
            adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one, too
            optimizer._step_supports_amp_scaling = adam and bool(optimizer.defaults.get("fused"))
        return super().connect(model, optimizers, lr_schedulers)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs backward, unscales, then logs and clips, then steps unless there was an overflow."""
        if closure() is None:  # a training step without a loss
            return after_closure(self, model, optimizer)
        self.scaler.unscale_(optimizer)
        after_closure(self, model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clips also with fused optimizers, which Lightning refuses: here gradients are unscaled before the step."""
        Precision.clip_gradients(self, *args, **kwargs)
