"""What is answered once is answered as Lightning and torch would in every step."""

import os

import torch
from lightning.pytorch import Callback

from core.language_module import LanguageModule
from core.training.every_step import BATCH_HOOKS
from plugins.objectives.causal_lm import CausalLM
from tests.support.tiny_training import fit, module, tiny_gpt, uneven_batches


class One(Callback):
    """Has one hook of its own, and one that it is given."""

    def __init__(self):
        self.calls = []
        self.on_train_batch_start = lambda *args: self.calls.append("start")

    def on_train_batch_end(self, *args):
        self.calls.append("end")


class Two(One):
    """Inherits a hook."""

    def on_after_backward(self, *args):
        self.calls.append("backward")


class WithoutIndex(LanguageModule):
    """Takes no `batch_idx`."""

    def training_step(self, batch):
        return super().training_step(batch, 0)


def test_a_callback_has_the_calls_that_it_had_before(tmp_path):
    one, two = One(), Two()
    fit(tmp_path, module(), uneven_batches(2), [one, two, Callback()], max_epochs=1)
    assert one.calls == ["start", "end"] * 2
    assert two.calls == ["start", "backward", "end"] * 2
    fit(tmp_path, module(), uneven_batches(1), [one, two], max_epochs=1)  # and in the next fit
    assert one.calls == ["start", "end"] * 3
    assert two.calls == ["start", "backward", "end"] * 3


def test_the_hooks_are_all_that_lightning_calls_for_a_batch(tmp_path, monkeypatch):
    from lightning.pytorch.trainer import call

    called, original = set(), call._call_callback_hooks

    def noted(trainer, hook, *args, **kwargs):
        called.add(hook)
        return original(trainer, hook, *args, **kwargs)

    monkeypatch.setattr(call, "_call_callback_hooks", noted)
    fit(tmp_path, module(), uneven_batches(1), max_epochs=1)
    assert {hook for hook in called if "batch" in hook or "zero" in hook or "ward" in hook} <= set(
        BATCH_HOOKS
    )
    assert set(BATCH_HOOKS) <= called


def test_a_training_step_gets_what_it_takes(tmp_path):
    trained = WithoutIndex(tiny_gpt, CausalLM(), lambda groups: torch.optim.SGD(groups, lr=0.5))
    runner = fit(tmp_path, trained, uneven_batches(3), max_epochs=1)
    assert runner.global_step == 3


def test_nvml_is_asked_where_there_is_a_device_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    before = torch.cuda.is_available()
    fit(tmp_path, module(), uneven_batches(1), max_epochs=1)
    assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ) == before
    assert torch.cuda.is_available() == before
