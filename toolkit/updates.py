"""Dropping an optimizer's update on the device, without the host waiting for the decision; compiling updates and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

__all__ = ["CompilesLoss", "CompilesUpdate", "DropsUpdates", "drop_update", "drops_updates"]


Function = Callable[..., Any]


@runtime_checkable
class CompilesUpdate(Protocol):
    """An optimizer of many small kernels, of which torch.compile can make few."""

    def compile_update(self, compiled: Callable[[Function], Function]) -> None:
        """Steps with a compiled function from now on.

        Args:
            compiled: Returns a function compiled, with dynamic shapes. What changes from step to step has to be in tensors:
                another graph is made for each other number.
        """


@runtime_checkable
class CompilesLoss(Protocol):
    """An objective whose losses of positions are many small kernels, of which torch.compile can make few."""

    def compile_loss(self, call: Function | None) -> None:
        """Computes losses from logits with compiled code from now on.

        Args:
            call: Calls a function with arguments, compiled: tensors of few shapes, and constants. None: nothing is compiled any more.
        """


@runtime_checkable
class DropsUpdates(Protocol):
    """An optimizer that drops updates by means of its own."""

    def drop_update(self, drop: Tensor) -> None:
        """Leaves out the update of this step if `drop` (0-d, boolean, on the device) of any call in it is true."""


def drops_updates(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer can leave weights and state unchanged as a flag on the device says.

    torch's fused kernels do so where the optimizer's `found_inf` is 1: made for fp16 gradients that overflow.
    """
    if isinstance(optimizer, DropsUpdates):
        return True
    known = isinstance(optimizer, Adam | SGD | Adagrad)  # AdamW is an Adam
    return known and all(group.get("fused") for group in optimizer.param_groups)


def drop_update(optimizer: Optimizer, drop: Tensor) -> None:
    """Leaves out the next update if `drop` (0-d, boolean, on the device) of any call since the last one is true."""
    if isinstance(optimizer, DropsUpdates):
        optimizer.drop_update(drop)
        return
    known, drop = vars(optimizer), _beside_weights(optimizer, drop.float())
    if "_drops_updates" not in known:
        hooks = optimizer.register_step_pre_hook(_repeat_drop), optimizer.register_step_post_hook(_keep_next)
        known["_drops_updates"] = hooks
    known["found_inf"] = known["_drop"] = torch.maximum(known["_drop"], drop) if "_drop" in known else drop


def _beside_weights(optimizer: Optimizer, flag: Tensor) -> Tensor:
    """Returns the flag where the optimizer steps, once it is there.

    torch copies one that is elsewhere without waiting for the copy, and a step on the CPU then reads it too early.
    """
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return flag.to(next(weights, flag).device)


def _repeat_drop(optimizer: Any, *_: Any) -> None:
    """Adds the flag to what a gradient scaler has found, which it writes over `found_inf` as the step begins."""
    if (drop := vars(optimizer).get("_drop")) is not None:
        optimizer.found_inf = torch.maximum(_beside_weights(optimizer, optimizer.found_inf), drop)


def _keep_next(optimizer: Any, *_: Any) -> None:
    """Makes the next update again."""
    if vars(optimizer).pop("_drop", None) is not None and not hasattr(optimizer, "grad_scale"):
        del optimizer.found_inf  # a gradient scaler, which sets `grad_scale` too, deletes both itself
