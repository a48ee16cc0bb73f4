"""The gradient noise scale: its estimate, and what a callback offers that measures it."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

__all__ = ["MeasuresGradientNoise", "estimate"]


@runtime_checkable
class MeasuresGradientNoise(Protocol):
    """A callback that measures the gradient noise scale, before `on_train_batch_end` of those that use it.

    Attributes:
        measurements: How many there were in the run; the same on every rank.
        batch_ratio: The noise scale of now over the batch of the step that was measured last; None: not known yet.
    """

    measurements: int

    @property
    def batch_ratio(self) -> float | None:
        """See above."""


def estimate(small: float, inverse_small: float, big: float, inverse_big: float) -> tuple[float, float]:
    """Returns unbiased estimates of |G|^2 and tr(S), where E|g|^2 = |G|^2 + tr(S) / B of a batch of B tokens.

    As in arXiv:1812.06162, appendix A.1; NaN where the batches are of one size.

    Args:
        small: |g|^2 of small batches, mean over several.
        inverse_small: Mean of their 1 / B.
        big: |g|^2 of a larger batch, which may consist of them.
        inverse_big: Its 1 / B.
    """
    if not inverse_small > inverse_big:
        return math.nan, math.nan
    noise = (small - big) / (inverse_small - inverse_big)
    return big - noise * inverse_big, noise
