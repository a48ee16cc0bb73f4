"""Dropping an optimizer's update on the device, where the host does not know that it is dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer


def drops_updates(optimizer: Optimizer) -> bool:
    """Whether an optimizer can leave weights and state as they are at a word from the device.

    torch's fused kernels do so where the optimizer's `found_inf` is 1: made for fp16 gradients that overflow.
    """
    known = isinstance(optimizer, Adam | SGD | Adagrad)  # AdamW is an Adam
    return known and all(group.get("fused") for group in optimizer.param_groups)


def drop_update(optimizer: Optimizer, drop: Tensor) -> None:
    """Leaves out the coming update if `drop` (0-d, boolean, on the device), or what was said before, is true."""
    told, drop = vars(optimizer), drop.float()
    if "_repeats_drop" not in told:
        told["_repeats_drop"] = optimizer.register_step_pre_hook(_repeat_drop)
    told["found_inf"] = told["_drop"] = torch.maximum(told["_drop"], drop) if "_drop" in told else drop


def keep_updates(optimizer: Any) -> None:
    """Makes the next update again, whatever was said about the last one."""
    told = vars(getattr(optimizer, "optimizer", optimizer))
    told.pop("_drop", None)
    told.pop("found_inf", None)


def _repeat_drop(optimizer: Any, *_: Any) -> None:
    """Adds what was said to what a gradient scaler has found, and has written over it as the step begins."""
    if (drop := vars(optimizer).get("_drop")) is not None:
        optimizer.found_inf = torch.maximum(optimizer.found_inf, drop)
