"""The gradient noise scale: its estimate, what a callback offers that measures it, and what a strategy offers to it."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["MeasuresGradientNoise", "MeasuresParts", "estimate"]


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


@runtime_checkable
class MeasuresParts(Protocol):
    """A strategy that may compute all micro-batches of a step with the last one, as those with pipelines do."""

    def step_parts(self, batches: int) -> int:
        """Returns into how many parts a step of so many micro-batches can be taken; 0: each is computed as it comes."""

    def measure_parts(self) -> list[tuple[Tensor, Tensor]]:
        """Lets the coming step be computed part by part; called on every rank, before its first micro-batch.

        Returns a list, empty until the last backward of the step. Then it has for each part the squared norm of the gradient of
        its summed losses, averaged over the ranks that have different tokens, and the weight of this rank's tokens; both 0-d.
        """


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
