"""What DivergenceGuard computes."""

import math

import pytest
from acme_guard.divergence_guard import DivergenceGuard

from core.errors import ConfigError


def test_mean_and_variance_are_the_weighted_ones():
    losses, weight = [5.0, 4.0, 6.0, 3.0, 2.5], 0.25
    guard = DivergenceGuard(warmup=9, weight=weight)
    for loss in losses:
        guard.counts(loss)
    ages = range(len(losses) - 1, -1, -1)
    weights = [(1 - weight) ** age * (weight if age < len(losses) - 1 else 1) for age in ages]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    variance = sum(w * (loss - mean) ** 2 for w, loss in zip(weights, losses, strict=True))
    assert sum(weights) == pytest.approx(1)
    assert guard.state_dict()["mean"] == pytest.approx(mean)
    assert guard.state_dict()["variance"] == pytest.approx(variance)


def test_only_losses_in_a_row_end_the_run():
    guard = DivergenceGuard(sigma=3, patience=2, warmup=4)
    calm = [4.0, 4.2, 3.8, 4.1]
    counted = [guard.counts(loss) for loss in [*calm, 9.0, 4.0, math.nan, math.inf]]
    assert counted == [False] * 7 + [True]


def test_a_restored_guard_judges_like_the_one_that_was_saved():
    whole, stopped, resumed = (DivergenceGuard(sigma=1, patience=2, warmup=2) for _ in range(3))
    losses = [4.0, 3.0, 9.0, 8.0]
    counted = [whole.counts(loss) for loss in losses]
    assert [stopped.counts(loss) for loss in losses[:3]] == counted[:3]
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.counts(losses[3]) is counted[3] is True


@pytest.mark.parametrize("options", [{"patience": 0}, {"warmup": 1}, {"sigma": 0.0}, {"weight": 1.0}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DivergenceGuard(**options)
