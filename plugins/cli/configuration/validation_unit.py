"""The unit of `trainer.val_check_interval` in a checkpoint's configuration: optimizer steps, or once micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNIT = "val_check_interval"
"""Under this key a checkpoint's record says "steps"; older ones counted micro-batches."""


def stored_in_steps(stored: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's configuration with `val_check_interval` in optimizer steps.

    Args:
        stored: The configuration.
        record: What the checkpoint says of its run. One without a unit counted micro-batches; its validations
            come after as many of them, or, where that is no integer number of steps, after the step before.
    """
    trainer = stored.get("trainer")
    if record.get(UNIT) == "steps" or not isinstance(trainer, Mapping):
        return dict(stored)
    every, accumulated = trainer.get("val_check_interval"), trainer.get("accumulate_grad_batches")
    if type(every) is not int or type(accumulated) is not int or accumulated < 2:
        return dict(stored)
    return {**stored, "trainer": {**trainer, "val_check_interval": max(every // accumulated, 1)}}
