"""DeepSpeed itself: imported for a device, configured, and its optimizer as Lightning sees it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from core.errors import ConfigError

BUCKET = 200_000_000
"""Elements that travel together at most, as in Lightning; DeepSpeed takes that much memory at once."""
FORMATS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def library(device: str) -> Any:
    """Imports DeepSpeed for a kind of device.

    Raises:
        ConfigError: If it is set up for another one.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(
        logging.ERROR
    )  # it warns of optimizers that it has not tried itself
    if (chosen := deepspeed.get_accelerator().device_name()) != device:
        raise ConfigError(
            f"DeepSpeed is set up for {chosen}, this run is on {device}: set DS_ACCELERATOR={device}."
        )
    # Sums for inference in shared memory, which it would compile for half a minute on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def configuration(
    module: nn.Module,
    device: str,
    format: torch.dtype,
    stage: int,
    persistence_threshold: int,
    **offload: Any,
) -> dict[str, Any]:
    """Returns the configuration of an engine.

    Args:
        module: What is trained.
        device: "cpu" or "cuda".
        format: What the network is kept and computed in.
        stage: 1, 2 or 3.
        persistence_threshold: Elements up to which a parameter stays whole, in stage 3.
        offload: "nvme_path", and where "offload_optimizer" and "offload_param" go.
    """
    elements = sum(p.numel() for p in module.parameters())
    bucket, cuda = min(BUCKET, elements + elements % 2), device == "cuda"
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": cuda and stage == 3,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = persistence_threshold
    path = offload.pop("nvme_path")
    for name, place in offload.items():
        if place != "none":
            zero[name] = {"device": place, "nvme_path": path, "pin_memory": cuda}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # for figures of DeepSpeed's own alone
        "gradient_accumulation_steps": 1,  # it is told of each micro-batch whether it is the last
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused kernels step on the CPU as well
        "zero_optimization": zero,
    }
    if format == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    elif format == torch.float16:
        config |= {"fp16": {"enabled": True}}
    return config


def cast(module: nn.Module, format: torch.dtype) -> None:
    """Makes floating parameters of that format, one at a time; buffers stay as they are."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(format)


class EngineOptimizer(Optimizer):
    """What Lightning sees of DeepSpeed's optimizer: gradients stay with DeepSpeed, and wait for one factor.

    Attributes:
        zero: DeepSpeed's optimizer around that of the run.
        factor: What the gradients of this step will be multiplied by, 0-d; None: 1.
    """

    def __init__(
        self, engine: Any, stage: int
    ) -> None:  # not torch's, which would make groups and states of its own
        self.engine, self.zero, self.stage = engine, engine.optimizer, stage
        self.defaults = self.zero.optimizer.defaults
        self.factor: Tensor | None = None

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the run's own optimizer."""
        groups: list[dict[str, Any]] = self.zero.optimizer.param_groups
        return groups

    @property  # type: ignore[override]
    def state(self) -> Any:
        """The states of the run's own optimizer, by flat parts."""
        return self.zero.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: DeepSpeed gives gradients up after each step."""

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients times the factor, 0-d; infinite where one is not finite."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self.zero
        groups = [zero.scaled_global_norm()] if self.stage < 3 else zero._get_norm_groups()
        norm: Tensor = combine_grad_norm_groups(groups) / zero.loss_scale
        return norm if self.factor is None else norm * self.factor.to(norm.device)

    def step(self, closure: Callable[[], Any]) -> Any:
        """Runs forward, backward and hooks; then DeepSpeed divides gradients by a loss scale, clips and steps."""
        self.factor = None
        result = closure()
        zero = self.zero
        if self.factor is not None:
            factor = float(self.factor)
            zero.override_loss_scale(zero.loss_scale / factor if factor else math.inf)
        self.engine.step()
        zero.custom_loss_scaler = False
        return result
