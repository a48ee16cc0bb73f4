"""What the callbacks of this folder cost in steps that are not logged: counted, not timed."""

import sys

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


def hooks_of_a_step(callback):
    """Those that are called: an empty one is None once training has started."""
    hooks = ((callback.on_train_batch_start, ({}, 0)), (callback.on_train_batch_end, (None, {}, 0)))
    return [(hook, arguments) for hook, arguments in hooks if hook is not None]


class CountingTrainer(Trainer):
    """Notes at which step somebody asked for the metrics, which is slow."""

    asked_at: list = []

    @property
    def callback_metrics(self):
        self.asked_at.append(self.global_step)
        return super().callback_metrics


@pytest.fixture
def callbacks(everything, tmp_path):
    return [callback for callback in everything(tmp_path) if not isinstance(callback, ModelCheckpoint)]


def test_metrics_are_fetched_in_logged_steps_alone(callbacks, fit, make_trainer, module, data, tmp_path):
    trainer = make_trainer(tmp_path, callbacks, kind=CountingTrainer, limit_val_batches=0, max_steps=20)
    CountingTrainer.asked_at = asked_at = []
    trainer.fit(module(), datamodule=data())
    assert set(asked_at) <= {4, 5, 9, 10, 14, 15, 19, 20}  # LanguageModule writes them before the count rises


def test_an_unlogged_step_calls_little(callbacks, make_trainer, module, data, tmp_path):
    """Counts the Python calls below the hooks of a step: a property of the trainer is 3 of them."""
    calls = {}

    class Counter(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step != 7:  # 5 and 10 are logged
                return
            for callback in callbacks:
                names, hooks = calls.setdefault(type(callback).__name__, []), hooks_of_a_step(callback)
                sys.setprofile(
                    lambda frame, event, _, names=names: names.append(event) if "call" in event else None
                )
                for hook, arguments in hooks:
                    hook(trainer, pl_module, *arguments)
                sys.setprofile(None)

    trainer = make_trainer(tmp_path, [*callbacks, Counter()], max_steps=8, limit_val_batches=0)
    trainer.fit(module(), datamodule=data())
    # each figure: the hooks that are not empty, `pl_module.logging_step` (an attribute: no call), the last setprofile
    own = {name: len(events) for name, events in calls.items() if name != "TextSamples"}
    assert own == {"Throughput": 3, "ProgressBar": 2, "LossCurve": 2, "RunSummary": 1}
    assert len(calls["TextSamples"]) <= 11  # asks for the step where `every_n_steps` is set


def test_nothing_is_allocated_on_the_device_in_an_unlogged_step(callbacks, run):
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoOperations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    run.module.logging_step = False
    with NoOperations():
        with pytest.raises(AssertionError):
            torch.zeros(1)  # the guard works
        for callback in run.trainer.callbacks:
            if not isinstance(callback, ModelCheckpoint):
                for hook, arguments in hooks_of_a_step(callback):
                    hook(run.trainer, run.module, *arguments)
