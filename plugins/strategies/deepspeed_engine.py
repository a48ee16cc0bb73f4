"""DeepSpeed's engine: import for a device, configuration, and a wrapper of its optimizer for Lightning."""

from __future__ import annotations

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from core.errors import ConfigError

BUCKET = 200_000_000
"""Largest number of elements in a communication bucket, as in Lightning; DeepSpeed allocates that much at once."""
FORMATS = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def library(device: str) -> Any:
    """Imports DeepSpeed for a device type.

    Raises:
        ConfigError: If it is set up for another one.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    # It warns of optimizers that it was not tested with.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if (chosen := deepspeed.get_accelerator().device_name()) != device:
        raise ConfigError(
            f"DeepSpeed is set up for {chosen}, this run is on {device}: set DS_ACCELERATOR={device}."
        )
    # An all-reduce for inference, whose compilation would take half a minute on a CPU.
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
        module: The module that is trained.
        device: "cpu" or "cuda".
        format: Data type of the network's weights and computation.
        stage: 1, 2 or 3.
        persistence_threshold: In stage 3, largest number of elements of parameters that are not sharded.
        offload: "nvme_path", and the places of "offload_optimizer" and "offload_param".
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
        "train_micro_batch_size_per_gpu": 1,  # used only for DeepSpeed's own statistics
        "gradient_accumulation_steps": 1,  # `set_gradient_accumulation_boundary` marks the last micro-batch
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused kernels also run on the CPU
        "zero_optimization": zero,
    }
    if format == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    elif format == torch.float16:
        config |= {"fp16": {"enabled": True}}
    return config


class OneByOne(nn.Module):
    """What DeepSpeed takes for a module: it asks once for its parameters, and shards each before it asks for the next."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._filled = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields those that it was given."""
        yield from self._filled


class EngineOptimizer(Optimizer):
    """Wraps DeepSpeed's optimizer for Lightning; DeepSpeed keeps the gradients, and scales them when it steps.

    Attributes:
        zero: DeepSpeed's optimizer, which wraps that of the run.
        factor: Factor for the gradients of this step, 0-d; None: 1.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        # Does not call the constructor of torch, which would make other groups and states.
        self.engine, self.zero, self.stage = engine, engine.optimizer, stage
        self.defaults = self.zero.optimizer.defaults
        self.factor: Tensor | None = None
        self._dropped: Tensor | None = None
        self._listeners: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` after each step."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = hook
        return handle

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch's is an attribute
        """The groups of the run's optimizer."""
        groups: list[dict[str, Any]] = self.zero.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch's is an attribute
        """The states of the run's optimizer, by flat partition."""
        return self.zero.optimizer.state

    def replace(self, optimizer: Optimizer) -> None:
        """Steps the flat partitions by another optimizer from now on, which has no states yet.

        Args:
            optimizer: Was built of the network's parameters, with the groups of the present one.
        """
        for group, present in zip(optimizer.param_groups, self.param_groups, strict=True):
            group["params"] = present["params"]
        self.zero.optimizer = optimizer
        self.defaults = optimizer.defaults

    def drop_update(self, drop: Tensor) -> None:
        """Leaves out the update of this step if the flag, 0-d, of any call is true; see `toolkit.updates.DropsUpdates`."""
        self._dropped = drop if self._dropped is None else self._dropped | drop

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: DeepSpeed frees gradients after each step."""

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients times the factor, 0-d; infinite if a gradient is not finite."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self.zero
        groups = [zero.scaled_global_norm()] if self.stage < 3 else zero._get_norm_groups()
        return self.scaled(combine_grad_norm_groups(groups))

    def scaled(self, values: Tensor) -> Tensor:
        """Returns what DeepSpeed has of gradients, or their norm, without its loss scale and times the factor."""
        values = values / self.zero.loss_scale
        return values if self.factor is None else values * self.factor.to(values.device)

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]  # Lightning always gives one
        """Runs the closure (forward, backward, hooks); then DeepSpeed unscales and clips gradients, and steps."""
        self.factor = self._dropped = None
        result = closure()
        zero = self.zero
        if self.factor is not None:
            factor = float(self.factor)
            zero.override_loss_scale(zero.loss_scale / factor if factor else math.inf)
        dropped = self._dropped is not None and bool(self._dropped)
        with self._without_norm() if dropped else nullcontext():
            self.engine.step()
        zero.custom_loss_scaler = False
        for hook in list(self._listeners.values()):
            hook(self, (), {})
        return result

    @contextmanager
    def _without_norm(self) -> Iterator[None]:
        """Lets DeepSpeed find a norm that is not finite, whereupon it frees the gradients and steps nothing."""
        name = "scaled_global_norm" if self.stage < 3 else "_get_norm_groups"
        infinite = torch.tensor(math.inf)
        setattr(self.zero, name, lambda *_, **__: infinite if self.stage < 3 else [infinite])
        try:
            yield
        finally:
            delattr(self.zero, name)
