"""Intervals and tests by resampling: closed forms, and how often they are wrong."""

from itertools import product
from math import comb, sqrt

import numpy as np
import pytest

from toolkit.resampling import adjusted, difference, intervals


def mean(sums):
    return {"mean": sums["total"] / sums["count"]} if sums.get("count") else {}


def items(values):
    return [{"total": float(value), "count": 1.0} for value in values]


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = intervals(items(values), mean, resamples=4000)["mean"]
    error = values.std() / sqrt(len(values))
    assert found.value == pytest.approx(values.mean(), rel=1e-12)
    # the limit's own standard error with 4,000 draws is 0.04 of the mean's
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_a_paired_test_counts_exchanges_and_an_unpaired_one_deals_out():
    one, other = [1.0, 2.0, 4.0, 3.0, 2.5, 1.5, 3.5], [1.5, 2.25, 4.0, 3.75, 3.5, 1.0, 3.75]
    gaps = np.array(other) - np.array(one)
    signs = np.array(list(product((-1, 1), repeat=7)))
    exact = np.mean(np.abs(signs @ gaps) >= abs(gaps.sum()) - 1e-12)
    found = difference(items(one), items(other), mean, paired=True, resamples=20_000)["mean"]
    assert found.p_value == pytest.approx(exact, abs=4 * sqrt(exact / 20_000))
    assert (found.first, found.second) == (np.mean(one), np.mean(other))
    assert found.least == 2 / 2**7
    low, high = [0.0, 1.0, 2.0], [5.0, 6.0, 7.0, 8.0]
    found = difference(items(low), items(high), mean, paired=False, resamples=20_000)["mean"]
    # as large only if the same three are dealt out to the first
    assert found.p_value == pytest.approx(1 / comb(7, 3), abs=4 * sqrt(1 / 35 / 20_000))
    assert found.low > 0


def test_networks_that_are_the_same_never_differ():
    values = np.random.default_rng(2).normal(size=30)
    found = difference(items(values), items(values), mean, paired=True)["mean"]
    assert (found.p_value, found.low, found.high) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("paired", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_equally_good_networks_give_a_false_alarm_in_a_twentieth_of_cases(paired):
    """400 comparisons of networks whose items differ by noise alone; 20 alarms are expected, 95% of cases are 12 to 29."""
    rng, alarms = np.random.default_rng(3), 0
    for _ in range(400):
        hardness = rng.gamma(2.0, size=40)  # of each document, the same for both
        one, other = (hardness + rng.normal(0, 0.3, 40) for _ in range(2))
        if not paired:
            other = rng.gamma(2.0, size=40) + rng.normal(0, 0.3, 40)
        found = difference(items(one), items(other), mean, paired, resamples=200)["mean"]
        alarms += found.p_value < 0.05
    assert 10 <= alarms <= 32


def test_pairs_show_a_difference_that_is_small_beside_that_of_documents():
    rng = np.random.default_rng(4)
    hardness = rng.gamma(2.0, size=60)
    one, other = hardness + rng.normal(0, 0.1, 60), hardness + 0.1 + rng.normal(0, 0.1, 60)
    assert difference(items(one), items(other), mean, paired=True)["mean"].p_value < 0.01
    assert difference(items(one), items(other), mean, paired=False)["mean"].p_value > 0.2


def test_sums_that_are_missing_are_nothing_and_figures_that_are_not_defined_are_left_out():
    found = intervals([{"total": 2.0, "count": 1.0}, {}, {}, {}], mean)["mean"]
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)  # where none is drawn there is no mean
    [alone] = intervals(items([3.0]), mean).values()
    assert alone.value == 3.0
    assert np.isnan([alone.low, alone.high]).all()
    assert intervals([], mean) == {}


def test_holm():
    assert adjusted([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert adjusted([0.6, 0.9]) == [1.0, 1.0]
