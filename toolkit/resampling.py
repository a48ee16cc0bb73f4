"""Intervals of figures and tests of differences, by resampling items whose sums the figures are computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["LEVEL", "RESAMPLES", "Difference", "Interval", "adjusted", "difference", "intervals"]

RESAMPLES = 1000
"""Resampled sets of items, by default."""

LEVEL = 0.95
"""Of intervals."""

ROUNDING = 2.0**-20
"""Differences of figures, relatively, that float32 explains: batches of another size, another device."""

_AT_ONCE = 1 << 22
"""Weights of items that exist at a time."""

Figures = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Makes figures of sums: `toolkit.evaluation.Evaluation.figures`."""

Sums = Sequence[Mapping[str, float]]
"""Sums of each item."""


class Interval(NamedTuple):
    """A figure, and the limits of its interval; NaN of a single item."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """A figure of two networks.

    Attributes:
        first: Of one.
        second: Of the other.
        low: Lower limit of `second - first`.
        high: Its upper limit.
        p_value: How probable a difference as large is, where the two are equally good.
        least: The least p-value that so many items can have: with few, no difference can show.
    """

    first: float
    second: float
    low: float
    high: float
    p_value: float
    least: float


def intervals(sums: Sums, figures: Figures, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Returns each figure of all items with its interval, from percentiles of the bootstrap over items.

    Efron's percentile interval: as many items are drawn with replacement, `resamples` times, always the same ones.

    Args:
        sums: Of each item.
        figures: What makes figures of total sums.
        resamples: How often items are drawn.
    """
    names, values = _table(sums)
    found = figures(dict(zip(names, values.sum(0).tolist(), strict=True)))
    if len(values) < 2:
        return {name: Interval(value, np.nan, np.nan) for name, value in found.items()}
    drawn = _figures(names, _drawn(values, resamples, np.random.default_rng(0)), figures, list(found))
    return {name: Interval(value, *_limits(drawn[name])) for name, value in found.items()}


def difference(
    first: Sums, second: Sums, figures: Figures, paired: bool, resamples: int = RESAMPLES
) -> dict[str, Difference]:
    """Returns how the figures of two networks differ, for those that both have.

    The interval is that of the bootstrap. The p-value is that of a permutation test (Fisher; for paired items, that of
    Noreen's approximate randomisation, as for BLEU in Riezler and Maxwell 2005): the results of an item are swapped, or all
    items are dealt out to the two at random, and it is counted how often the difference is at least as large as it was.

    Args:
        first: Sums of each item under one network.
        second: Under the other; with `paired` of the same items in the same order.
        figures: What makes figures of total sums.
        paired: Whether the items are the same.
        resamples: How often items are drawn, and swapped.
    """
    names, one = _table([*first, *second])
    one, other = one[: len(first)], one[len(first) :]

    def of(totals: np.ndarray) -> dict[str, np.ndarray]:
        return _figures(names, totals, figures)

    before, after = of(one.sum(0)[None]), of(other.sum(0)[None])
    both = [name for name in before if name in after]
    rng = np.random.default_rng(0)
    drawn_one = _drawn(one, resamples, rng)
    drawn_other = _drawn(other, resamples, np.random.default_rng(0) if paired else rng)
    bootstrap = of(drawn_one), of(drawn_other)
    permuted = tuple(map(of, _permuted(one, other, resamples, rng, paired)))
    exchanges = 2 ** (len(one) - 1) if paired else math.comb(len(one) + len(other), len(one))
    found = {}
    for name in both:
        gap = float(after[name][0] - before[name][0])
        moved = _column(permuted[1], name, resamples) - _column(permuted[0], name, resamples)
        size = max(abs(before[name][0]), abs(after[name][0]))
        as_large = np.abs(moved) >= abs(gap) - 1e-12 * size  # ties count
        as_large |= abs(gap) <= ROUNDING * size
        limits = _limits(_column(bootstrap[1], name, resamples) - _column(bootstrap[0], name, resamples))
        known = np.isfinite(moved)
        p_value = (1 + int((as_large & known).sum())) / (1 + int(known.sum()))
        found[name] = Difference(
            float(before[name][0]), float(after[name][0]), *limits, p_value, 1 / exchanges
        )
    return found


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Returns p-values of several tests such that at 5% all of them together give a false alarm in 5% at most (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    found, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - place)))
        found[index] = largest
    return found


def _table(sums: Sums) -> tuple[list[str], np.ndarray]:
    """Returns the names of sums, and their values (n, names)."""
    names = sorted({name for one in sums for name in one})
    values = [[one.get(name, 0.0) for name in names] for one in sums]
    return names, np.array(values, np.float64).reshape(len(sums), len(names))


def _parts(items: int, resamples: int) -> Iterator[int]:
    """Yields how many resamples are computed together."""
    most = max(1, _AT_ONCE // max(items, 1))
    for start in range(0, resamples, most):
        yield min(most, resamples - start)


def _drawn(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the total sums of items drawn with replacement, (resamples, names)."""
    items = len(values)
    shares = np.full(items, 1 / items)
    return np.concatenate(
        [rng.multinomial(items, shares, count) @ values for count in _parts(items, resamples)]
    )


def _permuted(
    one: np.ndarray, other: np.ndarray, resamples: int, rng: np.random.Generator, paired: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the total sums of both sides where networks are exchanged at random, each (resamples, names)."""
    total, sides = one.sum(0) + other.sum(0), []
    for count in _parts(len(one) + (0 if paired else len(other)), resamples):
        if paired:
            swapped = rng.integers(0, 2, (count, len(one)))
            sides.append(one.sum(0) + swapped @ (other - one))
        else:
            places = rng.random((count, len(one) + len(other))).argsort(1)
            sides.append((places < len(one)) @ np.concatenate([one, other]))
    first = np.concatenate(sides)
    return first, total - first


def _figures(
    names: Sequence[str], totals: np.ndarray, figures: Figures, wanted: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """Returns figures of each row of total sums, (rows,); NaN where a row does not define one."""
    rows = [figures(dict(zip(names, row, strict=True))) for row in totals.tolist()]
    wanted = wanted or list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in wanted}


def _column(found: Mapping[str, np.ndarray], name: str, rows: int) -> np.ndarray:
    return found.get(name, np.full(rows, np.nan))


def _limits(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return np.nan, np.nan
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
