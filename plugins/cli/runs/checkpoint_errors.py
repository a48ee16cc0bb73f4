"""Which errors of a resumed run come from what its checkpoint holds, not from a technique."""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb
from typing import Any

from core.errors import ConfigError
from plugins.cli.error_messages import explain_error

_KINDS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_LOADS = {"load_state_dict", "on_load_checkpoint"}
_FIRST_STEP = (
    "torch.optim",
    "plugins.optimizers",
    "plugins.schedules",
    "core.training.scheduling",
    "core.data",
    "datamodules",
)
"""Where the first step fails if the state of optimizer, schedule or data is not what it should be."""
_SCHEDULE = ("core.contracts", "step")
_COMPUTES = {"closure", "training_step"}
"""Within an optimizer's step, where the network is computed: that is no matter of state."""


def raise_if_from_checkpoint(error: Exception, checkpoint: Path, trainer: Any) -> None:
    """Raises a ConfigError if an error came from what a checkpoint holds; returns for others.

    Args:
        error: What ended the run.
        checkpoint: What the run went on from.
        trainer: The trainer, as the error left it.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if not isinstance(error, _KINDS) or isinstance(error, MisconfigurationException) or _is_machines(error):
        return
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        for frame, _ in walk_tb(error.__traceback__)
    ]
    loading = any(
        function in _LOADS or module.endswith(".checkpoint_connector") for module, function in frames
    )
    functions = {function for _, function in frames}
    in_state = any(
        module.startswith(_FIRST_STEP) or place == _SCHEDULE for place in frames for module in place[:1]
    )
    in_state = in_state and not functions & _COMPUTES
    if loading or (in_state and _in_first_step(checkpoint, trainer)):
        what = "cannot be loaded" if loading else "cannot be gone on from"
        raise ConfigError(
            f"{checkpoint} {what}: what it holds does not fit this run, or is damaged.\n{explain_error(error)}"
        ) from error


def _is_machines(error: Exception) -> bool:
    """Whether an error says that memory is short, or that another rank is gone."""
    signs = ("allocate memory", "onnection", "NCCL", "gloo", "Gloo", "imed out", "imeout")
    kind = type(error)
    return (
        "OutOfMemory" in kind.__name__
        or kind.__name__.startswith("Dist")
        or any(s in str(error) for s in signs)
    )


def _in_first_step(checkpoint: Path, trainer: Any) -> bool:
    from plugins.checkpoints.checkpoint import step_recorded

    begun = step_recorded(checkpoint)
    return begun is not None and trainer.global_step - begun <= 1  # the schedule steps after the optimizer
