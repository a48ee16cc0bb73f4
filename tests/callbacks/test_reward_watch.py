"""RewardWatch: what it warns of, what it keeps, and its picture; on real rollouts and on given figures."""

import logging
import os
from itertools import pairwise

import matplotlib.image
import numpy as np
import pytest

from callbacks.reward_watch import MAX_POINTS, PICTURE, RewardWatch, draw
from core.errors import ConfigError
from plugins.objectives.grpo import GRPO
from tests.support.rewarded import on_policy

FAIR = (0.5, 0.1, 100.0, 0.02)
"""Reward, KL, length, repetition."""


def told(caplog, first, then, **options):
    """Returns what is logged where the figures change, in units of the window."""
    watch = RewardWatch(window=3, **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "callbacks.reward_watch"):
        for step in range(12):
            watch.add((step, *(first if step < 6 else then)))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ((0.9, 0.1, 100.0, 0.02), []),  # it is better, and nothing else has changed
        ((0.9, 0.1, 201.0, 0.02), ["answers have 201 tokens instead of 100"]),
        ((0.9, 0.1, 200.0, 0.02), []),
        ((0.9, 0.1, 100.0, 0.5), ["of their 4-grams 18% repeat others instead of 2%"]),
        ((0.9, 1.5, 100.0, 0.02), ["KL divergence from the reference is 1."]),
        ((0.4, 5.0, 900.0, 0.9), []),  # the reward falls: nobody is fooled
        ((0.9, float("nan"), 100.0, 0.02), []),  # no reference
        ((0.9, 5.0, 900.0, 0.9), ["answers have", "4-grams", "KL divergence"]),
    ],
)
def test_it_warns_of_each_sign_once(then, expected, caplog):
    found = told(caplog, FAIR, then)
    assert len(found) == len(expected)
    for part in expected:
        [text] = [one for one in found if part in one]
        assert "the reward rose from 0.5 to " in text
        assert "read answers" in text


def test_limits_are_arguments(caplog):
    then = (0.9, 5.0, 900.0, 0.9)
    assert told(caplog, FAIR, then, max_length_ratio=10, max_repetition=1, max_kl=9) == []


def test_a_resumed_run_does_not_warn_again(caplog):
    watch, again = RewardWatch(window=2), RewardWatch(window=2)
    for step in range(4):
        watch.add((step, *FAIR))
    watch.add((4, 0.9, 0.1, 900.0, 0.02))
    watch.add((5, 0.9, 0.1, 900.0, 0.02))
    assert len(caplog.records) == 1
    again.load_state_dict(watch.state_dict())
    again.add((6, 0.9, 0.1, 900.0, 0.02))
    assert len(caplog.records) == 1
    watch.add((6, 0.9, 0.1, 900.0, 0.02))
    assert again.state_dict() == watch.state_dict()


def test_a_long_run_keeps_some_points():
    watch = RewardWatch()
    for step in range(3 * MAX_POINTS):
        watch.add((step, *FAIR))
    points = watch.state_dict()["points"]
    assert MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    assert len({b[0] - a[0] for a, b in pairwise(points)}) == 1


@pytest.mark.ci
def test_real_rollouts_are_watched(tmp_path):
    """The reward pays for tokens of small ids, of which a network without a penalty soon repeats one."""
    watch = RewardWatch(window=2, max_kl=0.0)
    _, _, figures = on_policy(tmp_path, GRPO(kl=0.01), 6, callbacks=[watch], log_every_n_steps=1)
    points = watch.state_dict()["points"]
    assert [point[0] for point in points] == list(range(1, 7))
    names = ("rollout/reward", "rollout/kl", "rollout/length", "rollout/repetition")
    logged = [[float(row[name]) for name in names] for row in figures if "rollout/reward" in row]
    np.testing.assert_allclose([point[1:] for point in points], logged, rtol=1e-6)
    picture = matplotlib.image.imread(tmp_path / PICTURE)
    assert picture.shape == (900, 1500, 4)
    assert picture.std() > 0.05


def test_the_picture_has_all_that_is_known(tmp_path):
    random = np.random.default_rng(0)
    steps = np.arange(1, 200)
    reward, kl = (
        1 - np.exp(-steps / 60) + random.normal(0, 0.03, 199),
        steps / 150 + random.normal(0, 0.02, 199),
    )
    points = list(zip(steps, reward, kl, 100 + steps, np.full(199, 0.1), strict=True))
    figure = draw(points, "a run")
    shown = {axes.get_xlabel() for axes in figure.axes} | {axes.get_ylabel() for axes in figure.axes}
    assert {
        "mean reward",
        "KL (nats per token)",
        "length (tokens)",
        "repeated 4-grams",
        "optimizer step",
    } <= shown
    without = draw([(s, r, float("nan"), n, p) for s, r, _, n, p in points], "a run")
    assert "KL (nats per token)" not in {axes.get_xlabel() for axes in without.axes}
    if folder := os.environ.get("LEYDEN_PICTURES"):
        figure.savefig(f"{folder}/reward_watch.png")


def test_mistakes():
    for options in ({"window": 1}, {"max_kl": -1.0}, {"max_length_ratio": float("nan")}):
        with pytest.raises(ConfigError, match="RewardWatch takes"):
            RewardWatch(**options)
