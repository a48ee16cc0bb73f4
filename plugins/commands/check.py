"""The command `check`: everything that `fit` checks before it starts, and in which order hooks will fire."""

from __future__ import annotations

from typing import Any

from core.technique import technique

HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_exception",
    "on_train_end",
    "on_fit_end",
    "teardown",
)
"""Lightning's callback hooks, in the order in which a run meets them."""


@technique(paper="own work: preflight without the flight")
def check(arguments: list[str]) -> int:
    """Parses, checks and builds a run without starting it; prints the selection and the order of hooks.

    Example:
        python -m core check --config quickstart --trainer.callbacks+=LearningRateMonitor
    """
    from core.cli import build

    cli = build("fit", arguments)
    print("\nCallbacks fire in this order:")
    for hook, names in firing_order(cli.trainer.callbacks).items():
        print(f"  {hook:<26} {', '.join(names)}")
    parameters = sum(parameter.numel() for parameter in cli.meta_network.parameters())
    print(f"\n{type(cli.meta_network).__name__}: {parameters:,} parameters. Nothing was started or written.")
    return 0


def firing_order(callbacks: list[Any]) -> dict[str, list[str]]:
    """Returns hook -> names of the callbacks that implement it, in the order in which they are called."""
    from lightning.pytorch import Callback

    order = {}
    for hook in HOOKS:
        default = getattr(Callback, hook)
        names = [type(item).__name__ for item in callbacks if getattr(type(item), hook) is not default]
        if names:
            order[hook] = names
    return order
