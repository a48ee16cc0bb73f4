"""Normal numbers within bounds, for `toolkit.initial_values`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.initial_values import Fill

__all__ = ["truncated_normal"]


def truncated_normal(mean: float, std: float, low: float, high: float) -> Fill:
    """Fills with numbers of N(mean, std^2) that lie in [low, high].

    Each is the quantile of one uniform number, in float64, which is exact also far from the mean.

    Args:
        mean: Of the normal distribution before it is cut.
        std: Its standard deviation, above 0.
        low: Least number.
        high: Largest number, above `low`.
    """
    # Quantiles near 1 lie denser than float64 has numbers there: what is right of the mean is drawn from the left.
    sign = -1.0 if low > mean else 1.0
    ends = sorted((sign * (low - mean) / std, sign * (high - mean) / std))
    first, last = (math.erfc(-end / math.sqrt(2.0)) / 2.0 for end in ends)

    def fill(part: Tensor, generator: torch.Generator) -> None:
        places = torch.empty_like(part, dtype=torch.float64).uniform_(first, last, generator=generator)
        part.copy_(torch.special.ndtri(places).mul_(sign * std).add_(mean)).clamp_(low, high)

    return fill
