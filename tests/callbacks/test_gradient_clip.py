"""GradientClip against torch's clipping and against ZClip's formulas; figures, accumulation, fp16."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from callbacks.gradient_clip import GradientClip
from core.errors import ConfigError
from tests.support.tiny_training import Record, fit, module, uneven_batches


class Gradients(Callback):
    """Keeps the gradients of each step; multiplies those of some steps first."""

    def __init__(self, factors=()):
        self.factors, self.kept = dict(factors), []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.network.parameters():
            parameter.grad.mul_(self.factors.get(trainer.global_step, 1.0))
        self.kept.append([p.grad.clone() for p in pl_module.network.parameters()])

    def norms(self):
        return [float(torch.nn.utils.get_total_norm(gradients)) for gradients in self.kept]


def still(groups):
    return torch.optim.SGD(groups, lr=0.0)


def run(tmp_path, clip, factors=(), steps=3, **options):
    """Returns the gradients before and after clipping, and the figures; the weights stay as they are."""
    before, after, record = Gradients(factors), Gradients(), Record()
    batches = uneven_batches(steps * options.get("accumulate_grad_batches", 1))
    fit(tmp_path, module(optimizer=still), batches, [before, clip, after, record], max_steps=steps, **options)
    return before, after, record


OPTIONS = [{}, {"accumulate_grad_batches": 3}, {"plugins": MixedPrecision("16-mixed", "cpu")}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("method", "limit"), [("norm", 0.5), ("norm", 1e6), ("value", 0.01)])
def test_it_is_torchs_clipping(tmp_path, method, limit, options):
    before, after, record = run(tmp_path, GradientClip(method, limit), **options)
    for own, found in zip(before.kept, after.kept, strict=True):
        parameters = [torch.nn.Parameter(gradient.clone()) for gradient in own]
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient.clone()
        if method == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        else:
            torch.nn.utils.clip_grad_value_(parameters, limit)
        for parameter, gradient in zip(parameters, found, strict=True):
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=1e-6, atol=0, equal_nan=True
            )  # fp16 overflows
    logged = [figures["train/grad_norm"] for figures in record.figures]
    assert logged == pytest.approx(before.norms(), rel=1e-6)
    finite = [both for both in zip(logged, after.norms(), strict=True) if math.isfinite(both[0])]
    assert len(finite) >= 2  # fp16 may overflow in the first step
    same = all(norm == pytest.approx(clipped, rel=1e-6) for norm, clipped in finite)
    assert same == (limit == 1e6)


def zclip(norms, alpha, z, warmup, limit):
    """Algorithm of arXiv:2504.02507 in float64: which norms become what."""
    found, mean, variance = [], 0.0, 0.0
    for step, norm in enumerate(norms):
        usual = norm
        if step >= warmup:
            deviation = math.sqrt(variance)
            score = (norm - mean) / (deviation + 1e-6)
            if score > z:
                usual = mean + z**2 / score * deviation
            mean = alpha * mean + (1 - alpha) * usual
            variance = alpha * variance + (1 - alpha) * (usual - mean) ** 2
        elif step == warmup - 1:
            mean, variance = np.mean(norms[:warmup]), np.var(norms[:warmup])
        found.append(min(usual, limit))
    return found


@pytest.mark.parametrize("limit", [None, 2.5])
def test_adaptive_is_zclip(tmp_path, limit):
    clip = GradientClip("adaptive", limit, alpha=0.9, z=2.0, warmup_steps=6)
    before, after, _ = run(tmp_path, clip, {4: 1.2, 9: 5.0, 10: 40.0, 15: 1.5}, steps=20)
    expected = zclip(before.norms(), 0.9, 2.0, 6, limit or math.inf)
    assert sum(a < b * 0.999 for a, b in zip(expected, before.norms(), strict=True)) >= 2
    # float32 statistics of norms of about 1
    assert after.norms() == pytest.approx(expected, rel=1e-4)


def test_a_norm_that_is_not_finite_leaves_the_statistics_alone(tmp_path):
    clip = GradientClip("adaptive", None, warmup_steps=4)
    run(tmp_path, clip, {2: math.inf, 7: math.nan}, steps=10)
    state = clip.state_dict()
    assert np.isfinite(state["mean"])
    assert 0 < state["variance"] < math.inf


def test_the_defaults_are_zclips_and_the_state_goes_on(tmp_path):
    clip = GradientClip("adaptive")
    assert (clip.alpha, clip.z, clip.warmup_steps, clip.limit) == (0.97, 2.5, 25, 1.0)
    run(tmp_path, clip, steps=30)
    other, shorter = GradientClip("adaptive"), GradientClip("adaptive", warmup_steps=4)
    for copy in (other, shorter):
        copy.load_state_dict(clip.state_dict())
    assert (other.state_dict()["steps"], shorter.state_dict()["steps"]) == (30, 0)
    for norm in (9.0, 0.5, 40.0):  # each is taken into the statistics, from which the next one's limit comes
        norm = torch.tensor(norm)
        usual = clip._usual(norm)
        assert torch.equal(other._usual(norm), usual)
        assert usual < norm or norm == 0.5


def test_two_owners_of_clipping_are_refused():
    from plugins.cli import preflight, selection
    from toolkit.selection import Run

    own = selection.describe("trainer.callbacks.0", GradientClip, "callbacks.gradient_clip.GradientClip")
    with pytest.raises(ConfigError, match="would both control the gradient clipping"):
        preflight.check(Run((own,), {"trainer": {"gradient_clip_val": 1.0}}))


@pytest.mark.parametrize(
    "options",
    [{"limit": 0.0}, {"limit": None}, {"method": "nrom"}, {"alpha": 1.0}, {"z": 0.0}, {"warmup_steps": 1}],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="GradientClip"):
        GradientClip(**options)


def test_the_norm_that_is_logged_is_that_before_values_are_clipped(tmp_path):
    """In the steps of the log, which alone need it."""
    before, _, record = run(tmp_path, GradientClip("value", 1e-3), steps=4, log_every_n_steps=2)
    logged = [figures["train/grad_norm"] for figures in record.figures]
    assert logged == pytest.approx(before.norms()[1::2], rel=1e-6)


def test_it_works_without_a_logger_or_a_logged_step(tmp_path):
    _, after, record = run(tmp_path, GradientClip("value", 1e-3), log_every_n_steps=50)
    assert record.figures == []
    assert max(gradient.abs().max() for gradient in after.kept[0]) == pytest.approx(1e-3)
