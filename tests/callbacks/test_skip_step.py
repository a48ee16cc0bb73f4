"""SkipStep against the rule computed on the host, and what a skipped step leaves as it was."""

import math

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from callbacks.skip_step import SkipStep
from core.__main__ import main
from core.errors import ConfigError
from plugins.optimizers.adamw import AdamW
from plugins.precision.fp16_mixed import FP16Mixed
from tests.support.tiny_training import CountWaits, fit, module, uneven_batches


class Spikes(Callback):
    """Multiplies the gradients of some steps, counted from 0, and notes weights and moments after each."""

    def __init__(self, factors):
        self.factors, self.states, self.figures = factors, [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        factor = self.factors.get(trainer.global_step, 1.0)
        for parameter in pl_module.network.parameters():
            parameter.grad.mul_(factor)
        self.figures.append((float(pl_module.step_loss), float(pl_module.gradient_norm(optimizer))))

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step > len(self.states):
            values = [*pl_module.network.parameters()]
            values += [v for state in trainer.optimizers[0].state.values() for v in state.values()]
            self.states.append([value.detach().clone() for value in values])

    def skipped(self):
        """The steps after which everything was as before."""
        pairs = enumerate(zip(self.states[:-1], self.states[1:], strict=True), 1)
        return [step for step, (a, b) in pairs if all(map(torch.equal, a, b))]


def by_the_rule(figures, window, sigma):
    history, skipped = [], []
    for step, now in enumerate(np.array(figures)):
        bad = not np.isfinite(now).all()
        if not bad and len(history) >= window:
            last = np.array(history[-window:])
            limit = last.mean(0) + sigma * last.std(0, ddof=1)
            bad = bool((now > limit).any())
            now = np.minimum(now, limit)
        if np.isfinite(now).all():
            history.append(now)
        skipped += [step] * (bad and step > 0)
    return skipped


def run(tmp_path, skip, factors, steps=30, optimizer=AdamW, **options):
    spikes = Spikes(factors)
    trained = module(optimizer=optimizer)
    batches = uneven_batches(steps * options.get("accumulate_grad_batches", 1))
    runner = fit(tmp_path, trained, batches, [spikes, skip], max_steps=steps, **options)
    return spikes, runner


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"},
                                     {"plugins": MixedPrecision("16-mixed", "cpu")}, {"plugins": FP16Mixed()}])  # fmt: skip
def test_it_skips_what_the_rule_says_and_nothing_of_it_is_left(tmp_path, options):
    factors = {12: 100.0, 13: 1000.0, 20: math.nan, 25: 1.5}
    spikes, runner = run(tmp_path, SkipStep(8, 6.0), factors, **options)
    expected = by_the_rule(spikes.figures, 8, 6.0)
    assert {12, 13, 20} <= set(expected)
    assert len(expected) < 8
    assert spikes.skipped() == expected
    assert float(runner.callback_metrics["skip_step/skipped"]) == len(expected)


def test_without_outliers_the_run_is_the_one_without_it(tmp_path):
    plain = run(tmp_path, Callback(), {}, steps=10)[0]
    guarded = run(tmp_path, SkipStep(4, 1e9), {}, steps=10)[0]
    assert all(map(torch.equal, plain.states[-1], guarded.states[-1]))


def test_a_loss_that_stays_higher_is_accepted_in_time(tmp_path):
    spikes, _ = run(tmp_path, SkipStep(8, 3.0), dict.fromkeys(range(10, 60), 3.0), steps=60)
    skipped = spikes.skipped()
    assert 10 in skipped
    assert len([step for step in skipped if step > 20]) < 5  # what 3 deviations of 8 norms leave out anyway
    assert skipped == by_the_rule(spikes.figures, 8, 3.0)


class Waits(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counter = CountWaits()
        self.counter.__enter__()

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.counter.__exit__(None, None, None)
        if not pl_module.logging_step:
            assert self.counter.waits == 0


def test_no_step_waits_for_the_decision(tmp_path):
    trained = module(optimizer=AdamW)
    runner = fit(
        tmp_path, trained, uneven_batches(12), [SkipStep(3, 1.0), Waits()], max_steps=12, log_every_n_steps=6
    )
    assert runner.callback_metrics["skip_step/skipped"] > 0


@pytest.mark.parametrize("options", [{"window": 1}, {"sigma": 0.0}, {"sigma": float("nan")}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="SkipStep takes"):
        SkipStep(**options)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, "select AdamW"),
        ({"class_path": "AdamW", "init_args": {"fused": False}}, "leave out --model.optimizer.fused=false"),
    ],
)
def test_an_optimizer_that_cannot_drop_an_update_is_refused(
    optimizer, message, tiny, tmp_path, monkeypatch, capsys
):
    tiny["model"]["optimizer"] = optimizer
    tiny["trainer"]["callbacks"].append({"class_path": "SkipStep"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--config=run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_at_training_it_is_refused_too(tmp_path):
    with pytest.raises(ConfigError, match="SGD cannot drop an update"):
        run(tmp_path, SkipStep(), {}, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
