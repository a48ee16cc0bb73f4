"""Win rates of models from choices between their answers, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from plugins.commands.prefer_tasks import SKIP, TIE
from plugins.commands.prefer_votes import Vote

Z = 1.959963984540054
"""Of a two-sided interval of 95%."""

RESAMPLES = 1000


class Rate(NamedTuple):
    """How often one model's answer was preferred to another's.

    Attributes:
        models: The two.
        wins: Choices of the first.
        ties: Choices of none.
        losses: Choices of the second.
    """

    models: tuple[str, str]
    wins: int
    ties: int
    losses: int

    @property
    def total(self) -> int:
        """Choices in all."""
        return self.wins + self.ties + self.losses

    @property
    def share(self) -> float:
        """The win rate of the first; a tie is half a win."""
        return (self.wins + self.ties / 2) / self.total


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's score interval (1927) of 95% for a share of `count` choices; with ties as half it is a little wide."""
    square = Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def rates(votes: Collection[Vote], pairs: Collection[tuple[str, str]] = ()) -> list[Rate]:
    """Returns the rates of all pairs that were compared, and of `pairs`, by name."""
    counted: dict[tuple[str, str], Counter[str]] = {pair: Counter() for pair in pairs}
    for vote in votes:
        if vote["choice"] != SKIP:
            first, second = sorted(vote["models"])
            counted.setdefault((first, second), Counter())[vote["choice"]] += 1
    return [Rate(pair, n[pair[0]], n[TIE], n[pair[1]]) for pair, n in sorted(counted.items())]


def strengths(found: Sequence[Rate], models: Sequence[str]) -> np.ndarray:
    """Returns the strengths of the Bradley-Terry model by the iteration of Hunter (2004), as Elo points of mean 0.

    P(i is preferred to j) = 1 / (1 + 10^((e_j - e_i) / 400)). A tie is half a win for each; each pair that was compared gets
    one tie on top, without which a model that always won would have no finite strength.
    """
    wins = np.zeros((len(models), len(models)))
    for rate in found:
        first, second = (models.index(name) for name in rate.models)
        wins[first, second] += rate.wins + (rate.ties + 1) / 2
        wins[second, first] += rate.losses + (rate.ties + 1) / 2
    games, values = wins + wins.T, np.ones(len(models))
    for _ in range(10_000):
        new = wins.sum(1) / (games / (values[:, None] + values)).sum(1)
        new /= np.exp(np.log(new).mean())
        if np.abs(new - values).max() < 1e-9:
            break
        values = new
    return 400 * np.log10(new)


def intervals(votes: Sequence[Vote], models: Sequence[str], seed: int = 0) -> np.ndarray:
    """Returns the percentile interval of 95% of each strength, (models, 2), from choices drawn with replacement."""
    random = np.random.default_rng(seed)
    pairs = [rate.models for rate in rates(votes)]
    drawn = (random.integers(len(votes), size=len(votes)) for _ in range(RESAMPLES))
    found = [strengths(rates([votes[n] for n in numbers], pairs), models) for numbers in drawn]
    return np.percentile(found, [2.5, 97.5], axis=0).T


def report(votes: Collection[Vote]) -> str:
    """Returns the report as text."""
    decided = [vote for vote in votes if vote["choice"] != SKIP]
    lines = [f"{len(decided)} choices, {len(votes) - len(decided)} skipped"]
    if not decided:
        return lines[0] + "\n"
    lines += ["", f"{'win rate':>8}  {'95% interval':>14}  {'won':>5} {'tied':>5} {'lost':>5}"]
    for rate in rates(decided):
        low, high = wilson(rate.share, rate.total)
        numbers = f"{rate.wins:>5} {rate.ties:>5} {rate.losses:>5}"
        lines.append(
            f"{rate.share:>8.1%}  {low:>6.1%} {high:>7.1%}  {numbers}  {rate.models[0]} over {rate.models[1]}"
        )
    models = sorted({name for vote in decided for name in vote["models"]})
    if len(models) > 2:
        values, spread = strengths(rates(decided), models), intervals(decided, models)
        lines += ["", f"{'Elo':>8}  {'95% interval':>14}  Bradley-Terry over all pairs"]
        for n in np.argsort(-values):
            lines.append(f"{values[n]:>8.0f}  {spread[n, 0]:>6.0f} {spread[n, 1]:>7.0f}  {models[n]}")
    preferred = [vote for vote in decided if vote["choice"] != TIE]
    if preferred:
        share = sum(vote["choice"] == vote["left"] for vote in preferred) / len(preferred)
        low, high = wilson(share, len(preferred))
        lines += [
            "",
            f"{share:>8.1%}  {low:>6.1%} {high:>7.1%}  the left answer preferred; about 50% without a bias",
        ]
    return "\n".join(lines) + "\n"
