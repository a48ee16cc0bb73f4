"""What T5 adds to the scores of attention for the distance between query and key."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativeBias(nn.Module):
    """A learned number for each head and range of distances; arXiv:1910.10683, section 2.1.

    Args:
        n_head: H.
        buckets: Ranges of distances: half of them for keys behind the query where `both_ways`.
        max_distance: From this distance on there is one range.
        both_ways: Whether keys behind the query have ranges of their own, or count as distance 0.
    """

    def __init__(self, n_head: int, buckets: int, max_distance: int, both_ways: bool):
        super().__init__()
        self.buckets, self.max_distance, self.both_ways = buckets, max_distance, both_ways
        self.table = nn.Embedding(buckets, n_head)

    def forward(self, length: int) -> Tensor:
        """Returns (1, H, length, length)."""
        places = torch.arange(length, device=self.table.weight.device)
        return self.table(self._bucket(places[None, :] - places[:, None])).permute(2, 0, 1)[None]

    def _bucket(self, distance: Tensor) -> Tensor:
        """Returns the range of key positions minus query positions: half are one distance each, half grow with its log."""
        buckets = self.buckets // 2 if self.both_ways else self.buckets
        first = torch.where(distance > 0, buckets, 0) if self.both_ways else torch.zeros_like(distance)
        distance = distance.abs() if self.both_ways else (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (growth * (buckets - exact)).to(torch.long)).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, wide)
