"""Logistic regression with an L2 penalty on sparse rows, in numpy, and the figures of a classifier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from core.errors import ConfigError

_BLOCK = 1 << 21
"""Values of the rows that are multiplied at once: what is held meanwhile is some 50 MB."""


class Rows(NamedTuple):
    """Sparse rows, one for each document.

    Attributes:
        columns: The columns of the values, row by row, int32 (n,).
        values: The values, float32 (n,).
        ends: Where each row ends in these, int64 (rows + 1,), 0 first; no row is empty.
    """

    columns: np.ndarray
    values: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> Rows:
        """Returns rows of (columns, values) pairs."""
        columns, values = zip(*rows, strict=True)
        ends = np.cumsum([0, *map(len, columns)])
        return cls(
            np.concatenate(columns, dtype=np.int32, casting="unsafe"),
            np.concatenate(values, dtype=np.float32, casting="unsafe"),
            ends,
        )

    def _blocks(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yields rows, their values, and where each row begins among these."""
        row, count = 0, len(self.ends) - 1
        while row < count:
            end = int(np.searchsorted(self.ends, self.ends[row] + _BLOCK, "right")) - 1
            end = min(max(end, row + 1), count)
            yield slice(row, end), slice(self.ends[row], self.ends[end]), self.ends[row:end] - self.ends[row]
            row = end

    def times(self, weights: np.ndarray) -> np.ndarray:
        """Returns the product with a vector of one number for each column, float64 (rows,)."""
        found = np.empty(len(self.ends) - 1)
        for rows, some, begins in self._blocks():
            found[rows] = np.add.reduceat(weights[self.columns[some]] * self.values[some], begins)
        return found

    def transposed_times(self, factors: np.ndarray, width: int) -> np.ndarray:
        """Returns the product of the transpose with a vector of one number for each row, float64 (width,)."""
        found = np.zeros(width)
        for rows, some, _ in self._blocks():
            lengths = np.diff(self.ends[rows.start : rows.stop + 1])
            repeated = np.repeat(factors[rows], lengths) * self.values[some]
            found += np.bincount(self.columns[some], repeated, width)
        return found


def fit(
    rows: Rows, labels: np.ndarray, width: int, l2: float, tolerance: float = 1e-7, most_steps: int = 1000
) -> tuple[np.ndarray, float, int]:
    """Minimises the mean of log(1 + exp(-y (w x + b))) plus l2/2 |w|^2, y being 1 or -1; b has no penalty.

    That is scikit-learn's `LogisticRegression(C=1 / (l2 * rows))`. The same for the same input: no random numbers.

    Args:
        rows: The documents.
        labels: 1 or 0 for each, (rows,).
        width: Number of columns.
        l2: Weight of the penalty, above 0.
        tolerance: Largest derivative that counts as 0.
        most_steps: Limit of the steps.

    Returns:
        Weights (width,), bias, number of steps.

    Raises:
        ConfigError: If it does not converge.
    """
    signs = np.where(labels, 1.0, -1.0)

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        weights = point[:-1]
        margins = signs * (rows.times(weights) + point[-1])
        slopes = -signs * sigmoid(-margins) / len(signs)
        gradient = np.append(rows.transposed_times(slopes, width) + l2 * weights, slopes.sum())
        return float(np.logaddexp(0, -margins).mean() + l2 / 2 * _dot(weights, weights)), gradient

    point, steps = minimise(objective, np.zeros(width + 1), tolerance, most_steps)
    return point[:-1], float(point[-1]), steps


def minimise(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    point: np.ndarray,
    tolerance: float,
    most_steps: int,
) -> tuple[np.ndarray, int]:
    """Returns where a smooth, strictly convex function is least, and the steps taken: L-BFGS.

    Nocedal and Wright, Numerical Optimization, algorithms 7.4 and 7.5, with the last 10 steps.

    Args:
        objective: Returns value and gradient at a point.
        point: Where to begin, (n,).
        tolerance: Largest absolute derivative at the end.
        most_steps: Limit of the steps.

    Raises:
        ConfigError: If the limit is reached, or rounding ends the search before.
    """
    history: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=10)
    value, gradient = objective(point)
    for step in range(most_steps):
        if np.abs(gradient).max() <= tolerance:
            return point, step
        direction = _direction(gradient, history)
        slope, length = _dot(direction, gradient), 1.0
        while True:
            new = point + length * direction
            new_value, new_gradient = objective(new)
            # Close to the end values differ by rounding alone; then the slope decides.
            flat = (
                abs(new_value - value) <= 1e-12 * abs(value) and _dot(new_gradient, direction) <= -0.8 * slope
            )
            if new_value <= value + 1e-4 * length * slope or flat:
                break
            length /= 2
            if length < 1e-12:
                raise ConfigError(_STOPPED.format(step))
        change, difference = new - point, new_gradient - gradient
        if (curvature := _dot(change, difference)) > 0:
            history.append((change, difference, curvature))
        point, value, gradient = new, new_value, new_gradient
    raise ConfigError(_STOPPED.format(most_steps))


_STOPPED = "The logistic regression did not converge in {} steps. Give a larger --l2."


def _direction(gradient: np.ndarray, history: deque[tuple[np.ndarray, np.ndarray, float]]) -> np.ndarray:
    """Returns the step that the approximate inverse of the second derivatives gives."""
    direction, factors = -gradient, []
    for change, difference, curvature in reversed(history):
        factors.append(_dot(change, direction) / curvature)
        direction = direction - factors[-1] * difference
    if history:
        _, difference, curvature = history[-1]
        direction = direction * (curvature / _dot(difference, difference))
    for (change, difference, curvature), factor in zip(history, reversed(factors), strict=True):
        direction = direction + (factor - _dot(difference, direction) / curvature) * change
    return direction


def _dot(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the inner product; BLAS would round differently with another number of threads."""
    return float((one * other).sum())


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0, -values))


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of probabilities on the right side of 0.5."""
    return float(((scores >= 0.5) == labels).mean())


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns how often a positive has a higher score than a negative, ties counting half; both have to be there."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positives = int(labels.sum())
    above = ranks[labels].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def calibration_error(scores: np.ndarray, labels: np.ndarray, bins: int = 10) -> float:
    """Returns the mean distance between probability and share of positives, in bins of equal width.

    Guo et al., arXiv:1706.04599, equation 3.
    """
    place = np.minimum((scores * bins).astype(int), bins - 1)
    differences = np.bincount(place, scores - labels, bins)
    return float(np.abs(differences).sum() / len(scores))
