"""WarmupCosine against its closed form, across a resume, and what it refuses."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from plugins.schedules.warmup_cosine import WarmupCosine

SETTINGS = [
    (10, 100, 0.1),
    (0, 100, 0.1),
    (1, 50, 0.0),
    (99, 100, 0.5),
    (10, 11, 0.1),
    (0, 1, 0.1),
    (7, 23, 1.0),
]


def closed_form(warmup, total, ratio):
    """The factors of all steps in float64, written as two vectors rather than one case after another."""
    steps = np.arange(total, dtype=np.float64)
    rising = (steps + 1) / max(warmup, 1)
    last = max(warmup - 1, 0)  # the step at the peak
    cosine = np.cos(np.pi * (steps - last) / max(total - 1 - last, 1))
    return np.where(steps < warmup, rising, ratio + (1 - ratio) * 0.5 * (1 + cosine))


def build(warmup, total, ratio, peaks=(1.0,), **options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
    optimizer = torch.optim.SGD(groups)
    schedule = WarmupCosine(optimizer, warmup, ratio, **options)
    schedule.bind(total)
    return optimizer, schedule


def warmup_cosine(step, warmup, total, ratio):
    """The factor of one step."""
    _, schedule = build(warmup, total, ratio)
    schedule.last_epoch = step
    return schedule.factor()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def run(optimizer, schedule, steps):
    """Returns the rates that each of `steps` optimizer steps is taken with."""
    taken = []
    for _ in range(steps):
        taken.append(rates(optimizer))
        optimizer.step()
        schedule.step()
    return taken


@pytest.mark.parametrize(("warmup", "total", "ratio"), SETTINGS)
def test_every_step_has_the_rate_of_the_closed_form(warmup, total, ratio):
    peaks = (3e-4, 2e-2)
    taken = np.array(run(*build(warmup, total, ratio, peaks), total))
    expected = closed_form(warmup, total, ratio)[:, None] * np.array(peaks)
    np.testing.assert_allclose(taken, expected, rtol=1e-13, atol=1e-18)


@pytest.mark.parametrize(("warmup", "total", "ratio"), SETTINGS[:4])
def test_the_corner_steps_are_exact(warmup, total, ratio):
    assert warmup_cosine(0, warmup, total, ratio) == (1 / warmup if warmup else 1.0)
    assert warmup_cosine(max(warmup - 1, 0), warmup, total, ratio) == 1.0
    assert warmup_cosine(total - 1, warmup, total, ratio) == pytest.approx(ratio, rel=1e-15, abs=1e-16)
    assert warmup_cosine(total + 50, warmup, total, ratio) == warmup_cosine(total - 1, warmup, total, ratio)


def test_the_middle_of_the_cosine_is_the_mean_of_peak_and_end():
    assert warmup_cosine(59, 20, 100, 0.1) == pytest.approx((1 + 0.1) / 2, rel=1e-15)


def test_it_rises_and_then_falls_and_never_leaves_its_bounds():
    factors = [warmup_cosine(step, 10, 80, 0.2) for step in range(120)]
    assert all(a < b for a, b in pairwise(factors[:10]))
    assert all(a > b for a, b in pairwise(factors[9:80]))
    assert max(factors) == 1.0
    assert min(factors[10:]) >= 0.2 - 1e-15


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 17, 39])
def test_after_a_resume_at_any_step_the_rates_are_bitwise_the_same(stop):
    whole = run(*build(5, 40, 0.1, (1e-3, 2e-3)), 40)
    optimizer, schedule = build(5, 40, 0.1, (1e-3, 2e-3))
    assert run(optimizer, schedule, stop) == whole[:stop]
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = build(5, 40, 0.1, (1e-3, 2e-3))
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert run(optimizer, schedule, 40 - stop) == whole[stop:]


def test_a_resumed_run_takes_length_and_peak_from_the_user():
    optimizer, schedule = build(5, 40, 0.1)
    run(optimizer, schedule, 20)
    state = schedule.state_dict()
    assert set(state) == {"last_epoch", "_step_count", "tokens"}  # a position, no settings
    optimizer, schedule = build(5, 80, 0.2, peaks=(3.0,))
    schedule.load_state_dict(state)
    schedule.bind(80)
    assert rates(optimizer) == [3.0 * closed_form(5, 80, 0.2)[20]] == schedule.get_last_lr()


def test_total_steps_of_its_own_win_over_the_length_of_the_run():
    taken = np.array(run(*build(5, 100, 0.1, total_steps=30), 60))[:, 0]
    np.testing.assert_allclose(taken[:30], closed_form(5, 30, 0.1), rtol=1e-13)
    np.testing.assert_allclose(taken[30:], 0.1, rtol=1e-13)


@pytest.mark.parametrize(
    "arguments",
    [
        {"warmup_steps": -1},
        {"min_lr_ratio": -0.1},
        {"min_lr_ratio": 1.1},
        {"min_lr_ratio": float("nan")},
        {"total_steps": 0},
        {"total_steps": -3},
    ],
)
def test_values_out_of_range_are_refused(arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="WarmupCosine"):
        WarmupCosine(optimizer, **arguments)


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (10, 5), (2, 2)])
def test_a_warm_up_as_long_as_the_schedule_is_refused(warmup, total):
    with pytest.raises(ConfigError, match=f"less than {total}"):
        build(warmup, total, 0.1)
    with pytest.raises(ConfigError, match=f"only {total} steps"):
        build(warmup, 1000, 0.1, total_steps=total)


def test_a_schedule_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="total_steps is 31, and the run has only 30 steps"):
        build(5, 30, 0.1, total_steps=31)


def test_a_run_of_one_step_needs_no_other_warm_up():
    assert run(*build(100, 1, 0.1), 1) == [[1 / 100]]
