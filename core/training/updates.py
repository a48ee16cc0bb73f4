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
    told: Any = optimizer
    drop = drop.float()
    told.found_inf = torch.maximum(told.found_inf, drop) if hasattr(told, "found_inf") else drop


def keep_updates(optimizer: Any) -> None:
    """Makes the next update again, whatever was said about the last one."""
    vars(getattr(optimizer, "optimizer", optimizer)).pop("found_inf", None)
