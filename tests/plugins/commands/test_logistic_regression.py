"""The logistic regression against scikit-learn's probabilities, Newton's method on dense rows, and its own gradient."""

import random

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.commands import logistic_regression
from plugins.commands.logistic_regression import (
    Rows,
    accuracy,
    area_under_curve,
    calibration_error,
    fit,
    sigmoid,
)
from toolkit.hashed_ngrams import HashedNGrams

WORDS = [
    "of",
    "the",
    "and",
    "lamp",
    "river",
    "stone",
    "click",
    "buy",
    "now",
    "free",
    "print",
    "maker",
    "winter",
    "train",
]


def documents(count=60):
    """Returns texts, and labels that half of the words decide, with noise."""
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) for _ in range(count)]
    scores = [
        text.count("lamp") + text.count("river") - text.count("buy") - text.count("free") for text in texts
    ]
    return texts, np.array([score + draw.gauss(0, 1) > 0 for score in scores])


@pytest.fixture(scope="module")
def examples():
    texts, labels = documents()
    return Rows.of(map(HashedNGrams(buckets=1024).row, texts)), labels


def dense(rows):
    found = np.zeros((len(rows.ends) - 1, 1024))
    for row, (begin, end) in enumerate(zip(rows.ends, rows.ends[1:], strict=False)):
        found[row, rows.columns[begin:end]] = rows.values[begin:end]
    return found


def newton(matrix, labels, l2):
    """Returns weights and bias where the gradient is 0, by Newton's method."""
    matrix = np.hstack([matrix, np.ones((len(matrix), 1))])
    penalty = np.append(np.full(matrix.shape[1] - 1, l2), 0)
    point = np.zeros(matrix.shape[1])
    for _ in range(30):
        chance = 1 / (1 + np.exp(-matrix @ point))
        slope = matrix.T @ (chance - labels) / len(labels) + penalty * point
        second = (matrix.T * (chance * (1 - chance))) @ matrix / len(labels) + np.diag(penalty)
        point -= np.linalg.solve(second, slope)
    return point


@pytest.mark.parametrize("l2", [1e-1, pytest.param(1e-3, marks=pytest.mark.ci)])
def test_the_optimum_is_that_of_newtons_method(examples, l2):
    rows, labels = examples
    weights, bias, steps = fit(rows, labels, 1024, l2, tolerance=1e-9)
    expected = newton(dense(rows), labels, l2)
    assert steps > 3
    np.testing.assert_allclose(np.append(weights, bias), expected, atol=1e-6)


SCIKIT_LEARN = {
    1e-2: ([0.7217259, 0.8220585, 0.4918453, 0.46702, 0.5033495, 0.2828439, 0.5199178, 0.6087284], -0.504142),
    1e-4: (
        [0.9670065, 0.9964071, 0.9007615, 0.0775029, 0.9291445, 0.005323, 0.0706403, 0.1276062],
        -3.215251,
    ),
}
"""l2 -> predict_proba of the first documents and intercept_ of LogisticRegression(C=1 / (l2 * 60), tol=1e-12), 1.9.1."""


@pytest.mark.parametrize("l2", SCIKIT_LEARN)
def test_probabilities_are_those_of_scikit_learn(examples, l2):
    rows, labels = examples
    weights, bias, _ = fit(rows, labels, 1024, l2, tolerance=1e-9)
    probabilities, intercept = SCIKIT_LEARN[l2]
    np.testing.assert_allclose(sigmoid(rows.times(weights) + bias)[:8], probabilities, atol=2e-7)
    assert bias == pytest.approx(intercept, abs=2e-6)


def test_products_in_blocks(examples, monkeypatch):
    rows, labels = examples
    weights, factors = np.sin(np.arange(1024.0)), np.cos(np.arange(len(labels)))
    for size in (1, 50, 1 << 20):
        monkeypatch.setattr(logistic_regression, "_BLOCK", size)
        np.testing.assert_allclose(rows.times(weights), dense(rows) @ weights, atol=1e-12)
        np.testing.assert_allclose(rows.transposed_times(factors, 1024), dense(rows).T @ factors, atol=1e-12)


def test_too_few_steps(examples):
    with pytest.raises(ConfigError, match=r"did not converge in 2 steps\. Give a larger --l2"):
        fit(*examples, 1024, 1e-3, most_steps=2)


def test_figures():
    labels = np.array([True, True, False, False, True])
    scores = np.array([0.9, 0.5, 0.5, 0.1, 0.4])
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels] for b in scores[~labels]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))
    assert accuracy(scores, labels) == pytest.approx(3 / 5)
    # bins 0.9: 1 of 0.9; 0.5: 1 of 2, mean 0.5; 0.1: 0 of 1; 0.4: 1 of 1
    assert calibration_error(scores, labels) == pytest.approx((0.1 + 0.0 + 0.1 + 0.6) / 5)
    assert calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0


def test_sigmoid_does_not_overflow():
    np.testing.assert_allclose(sigmoid(np.array([-1e4, -1.0, 0.0, 1e4])), [0, 1 / (1 + np.e), 0.5, 1])
