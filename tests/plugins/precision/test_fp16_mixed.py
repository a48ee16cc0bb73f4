"""FP16Mixed: real fp16, true gradients for norm and clipping, overflow, accumulation, resume."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from core.contracts import IGNORED_LABEL
from core.errors import ConfigError
from plugins.optimizers.adamw import AdamW
from plugins.precision.fp16_mixed import FP16Mixed
from tests.support.tiny_training import fit, module, uneven_batches

HALF = 2.0**-11
"""Relative rounding error of fp16."""


class Watch(Callback):
    """Notes what the products are computed in, and norm, scale and weights of each step."""

    def __init__(self):
        self.dtypes, self.norms, self.scales, self.weights = set(), [], [], []

    def on_fit_start(self, trainer, pl_module):
        for layer in pl_module.network.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda layer, args, out: self.dtypes.add(out.dtype))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.logging_step:
            self.norms.append(float(trainer.callback_metrics["train/grad_norm"]))
        self.scales.append(trainer.scaler.get_scale() if trainer.scaler else None)
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])


def train(tmp_path, plugin, batches=None, optimizer=None, ckpt_path=None, **options):
    watch = Watch()
    optimizer = optimizer or (lambda groups: torch.optim.SGD(groups, lr=0.1))
    trained = module(optimizer=optimizer)
    batches = batches or uneven_batches(6)
    options = {"max_epochs": 1, "plugins": plugin and [plugin], **options}
    runner = fit(tmp_path, trained, batches, [watch], ckpt_path, **options)
    return watch, trained, runner


def adamw(groups):
    return AdamW(groups, lr=1e-2)


def difference(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("accumulated", [1, 3])
def test_it_trains_as_float32_does_but_for_the_rounding_of_fp16(accumulated, tmp_path):
    options = dict(accumulate_grad_batches=accumulated, gradient_clip_val=0.5)
    exact, _, _ = train(tmp_path, None, **options)
    found, trained, _ = train(tmp_path, FP16Mixed(init_scale=1024.0), **options)
    assert found.dtypes == {torch.float16}
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert max(exact.norms) > 0.5  # so that clipping a scaled gradient would show
    # each of the some 10 products between loss and gradient rounds once; their errors are independent
    assert found.norms == pytest.approx(exact.norms, rel=10 * HALF)
    moved = difference(exact.weights[0], exact.weights[-1])
    assert difference(found.weights[-1], exact.weights[-1]) < 10 * HALF * moved * len(found.norms)


@pytest.mark.parametrize("scale", [4.0, 2.0**13])
def test_the_scale_changes_neither_norms_nor_weights(scale, tmp_path):
    """Powers of two change exponents only, as long as nothing over- or underflows."""
    one, _, _ = train(tmp_path, FP16Mixed(init_scale=scale), gradient_clip_val=0.5)
    other, _, _ = train(tmp_path, FP16Mixed(init_scale=2.0**12), gradient_clip_val=0.5)
    assert one.norms == pytest.approx(other.norms, rel=2 * HALF)  # subnormals round more coarsely


@pytest.mark.parametrize(
    "optimizer", [adamw, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)]
)
def test_an_overflow_skips_the_step_and_lowers_the_scale(optimizer, tmp_path):
    found, _, _ = train(tmp_path, FP16Mixed(init_scale=2.0**40), optimizer=optimizer)
    start, *scales = 2.0**40, *found.scales
    assert scales == [start / 2 ** (n + 1) for n in range(len(scales))]
    assert all(difference(found.weights[0], later) == 0 for later in found.weights)
    assert not any(map(math.isfinite, found.norms))


def test_after_overflows_it_trains_on_finite_values(tmp_path):
    """Also with fused SGD, whose momentum is only made in the first step that is not skipped."""

    def sgd(groups):
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)

    found, trained, _ = train(tmp_path, FP16Mixed(init_scale=2.0**18, backoff_factor=0.25), optimizer=sgd)
    skipped = sum(not math.isfinite(norm) for norm in found.norms)
    assert 0 < skipped < 3
    fresh, _, _ = train(
        tmp_path, FP16Mixed(init_scale=2.0**10), batches=uneven_batches(6)[skipped:], optimizer=sgd
    )
    expected = [norm for norm in found.norms if math.isfinite(norm)]
    assert len(fresh.norms) == len(expected)
    assert all(torch.isfinite(p).all() for p in trained.parameters())


def test_the_scale_grows_after_steps_without_an_overflow(tmp_path):
    found, _, _ = train(tmp_path, FP16Mixed(init_scale=4.0, growth_interval=2, growth_factor=3.0))
    assert found.scales == [4, 12, 12, 36, 36, 108]


def test_the_scaler_is_part_of_a_checkpoint(tmp_path):
    """That a run resumes bitwise with it is proved in tests/conformance; here, that its state is not the start's."""
    options = dict(init_scale=2.0**17, growth_interval=100)
    _, _, runner = train(tmp_path, FP16Mixed(**options))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    before = runner.scaler.state_dict()
    assert before["scale"] != 2.0**17
    assert before["_growth_tracker"] > 0
    _, _, resumed = train(tmp_path, FP16Mixed(**options), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.scaler.state_dict() == before


def test_tokens_weigh_alike_however_they_are_spread(tmp_path):
    """One batch of two rows, and its rows one after the other with accumulation: the same gradient."""
    [batch] = uneven_batches(1, rows=2)
    batch["labels"][1, 3:] = IGNORED_LABEL
    rows = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]
    whole, _, _ = train(tmp_path, FP16Mixed(1024.0), [batch])
    parts, _, _ = train(tmp_path, FP16Mixed(1024.0), rows, accumulate_grad_batches=2)
    assert parts.norms == pytest.approx(whole.norms, rel=10 * HALF)
    assert difference(parts.weights[-1], whole.weights[-1]) < 10 * HALF * whole.norms[0]


@pytest.mark.parametrize(
    "wrong", [{"init_scale": 0}, {"growth_factor": 1}, {"backoff_factor": 1}, {"growth_interval": 0}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="FP16Mixed takes init_scale > 0"):
        FP16Mixed(**wrong)
