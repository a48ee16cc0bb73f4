"""The command `check`: everything that `fit` checks before it starts, and in which order hooks will fire."""

from __future__ import annotations

from typing import Any

from core.errors import deprecated
from core.technique import technique

_BEFORE_BATCHES = (
    "setup",
    "on_load_checkpoint",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
)
_AFTER_BATCHES = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
    "teardown",
)


@technique(paper="own work: the checks of `fit`, without the run")
def check(arguments: list[str]) -> int:
    """Parses, checks and builds a run without starting it; prints the selection and the order of hooks.

    With --offline the run is checked for other machines, such as a cluster from a laptop: with as many processes as
    it names, on any devices; the packages that are checked are those installed here.

    Example:
        python -m core check --config quickstart --trainer.callbacks+=LearningRateMonitor
    """
    from plugins.cli.run_commands import build

    if "--elsewhere" in arguments:
        deprecated("check --elsewhere", "--offline")
    offline = not {"--offline", "--elsewhere"}.isdisjoint(arguments)
    if offline:
        arguments = [word for word in arguments if word not in ("--offline", "--elsewhere")] + [
            "--trainer.accelerator=cpu"
        ]
    cli = build("fit", arguments, offline=offline)
    print("\nHooks fire in this order:")
    for hook, names in firing_order(cli.trainer.callbacks, cli.model, cli.datamodule).items():
        print(f"  {hook:<26} {', '.join(names)}")
    print(f"\n{cli.network_summary}. Nothing was started or written.")
    return 0


def hooks() -> tuple[str, ...]:
    """Returns Lightning's callback hooks, in the order in which a run first meets them."""
    from core.training.every_step import BATCH_HOOKS

    return *_BEFORE_BATCHES, *BATCH_HOOKS, *_AFTER_BATCHES


def firing_order(callbacks: list[Any], model: Any = None, data: Any = None) -> dict[str, list[str]]:
    """Returns hook -> names of the classes that implement it, in the order in which they are called."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule

    def implements(item: Any, hook: str) -> bool:
        base = next(
            (kind for kind in (Callback, LightningModule, LightningDataModule) if isinstance(item, kind)),
            item,
        )
        function = getattr(item, hook, None)
        return getattr(function, "__func__", function) is not getattr(base, hook, None)

    order = {}
    for hook in hooks():
        called = [
            type(item).__name__ for item in _called(hook, callbacks, model, data) if implements(item, hook)
        ]
        if called:
            order[hook] = called
    return order


def _called(hook: str, callbacks: list[Any], model: Any, data: Any) -> list[Any]:
    """Returns who is called for a hook, in Lightning's order: callbacks, then the model, but for a few."""
    from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

    if hook in ("setup", "teardown"):
        return [data, *callbacks, model]
    if hook == "on_exception":
        return [*callbacks, data]
    if hook == "on_load_checkpoint":
        return [model, *callbacks]
    if hook == "on_train_epoch_end":  # what looks at metrics comes after the model has logged them
        late = [item for item in callbacks if isinstance(item, Checkpoint | EarlyStopping)]
        return [*(item for item in callbacks if item not in late), model, *late]
    return [*callbacks, model]
