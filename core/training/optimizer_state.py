"""The state of an optimizer as checkpoints have it, and what of it a resumed run takes from its configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core.contracts import BindsToLength, HasGroupState, Schedule

KERNELS = ("fused", "foreach", "capturable")
"""Settings of how a step is computed: the run's devices and strategy decide them, not the checkpoint."""

_MISSING = object()


def written_settings(optimizer: Optimizer, trainer: Any) -> list[dict[str, Any]]:
    """Returns the settings of each group of a new optimizer, after calling its `bind` with the length of the run.

    They are what the user wrote, the optimizer's defaults, and where it keeps state in the groups, the values that
    this begins with. An optimizer with a method `bind` has to know the number of optimizer steps.
    """
    if isinstance(optimizer, BindsToLength) and math.isfinite(steps := trainer.estimated_stepping_batches):
        optimizer.bind(int(steps))
    return [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def storable(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of groups that a checkpoint can hold: numbers, strings, tensors, lists of these."""
    return [{key: value for key, value in group.items() if _is_plain(value)} for group in settings]


def prefer_written(
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    written: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] | None,
    kind: type[Optimizer],
) -> None:
    """Gives settings that the user has changed since a checkpoint precedence over the checkpoint's.

    What an optimizer keeps in its groups may be a setting or state: Prodigy has its step size there, schedule-free
    optimizers their count of steps. So the groups are merged as versions of a file are. A value that a new
    optimizer has now as it had then was not changed by the user: the checkpoint's is kept. Of one that differs
    the new value is taken, unless training has changed it and it is no argument of the optimizer.

    Args:
        optimizer: Has been loaded from the checkpoint.
        scheduler: The learning-rate schedule of the run.
        written: The groups of the optimizer as it was built, of :func:`written_settings`.
        before: The same of the run that wrote the checkpoint; None where it did not say: arguments are then taken
            as written, all else as state.
        kind: Of the optimizer as it was built, which a strategy may have wrapped. What it names in an attribute
            `group_state` is state in any case.
    """
    state: set[str] = set(kind.group_state) if isinstance(kind, HasGroupState) else set()
    arguments = _arguments(kind)
    if before is None or len(before) != len(written):
        before = [{} for _ in written]
    for group, own, then in zip(optimizer.param_groups, written, before, strict=True):
        rate = group["lr"]
        for key in own.keys() - state:
            base = then.get(key, _MISSING)
            changed = base is _MISSING or not _same(own[key], base)
            trained = base is _MISSING or not _same(group.get(key, _MISSING), base)
            if key in KERNELS or (changed and (not trained or key in arguments)):
                group[key] = own[key]
        if isinstance(scheduler, Schedule):
            group["lr"] = own["lr"]  # it computes each rate from what was written
        elif scheduler is not None:
            group["lr"] = rate  # torch's schedules derive the next rate from the present one


def _arguments(kind: type) -> set[str]:
    """Returns the names of an optimizer's arguments, with those that it hands on to the classes it derives from."""
    constructors = [base.__init__ for base in kind.__mro__ if "__init__" in vars(base) and base is not object]  # type: ignore[misc]
    return {"lr", "weight_decay"}.union(*(inspect.signature(one).parameters for one in constructors))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _same(one: Any, other: Any) -> bool:
    one, other = (v.tolist() if isinstance(v, Tensor) else v for v in (one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)
