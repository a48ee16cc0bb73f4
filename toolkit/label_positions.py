"""Which positions of a batch have a label, where few have: what a data module says, and objectives read.

Shapes: B rows, T positions, at most M with a label, C features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import IGNORED_LABEL

__all__ = ["LABEL_POSITIONS", "at_labels", "label_positions"]

LABEL_POSITIONS = "label_positions"
"""Key of a batch: the positions with a label in each row, (B, M) int64, and -1 behind the last one.

For data modules that choose labels on the host. On a GPU their number is known only after waiting for the device.
"""

STEPS = 8
"""M is a multiple of T over this, so that almost all batches have the same shape."""


def label_positions(labels: Sequence[np.ndarray], width: int) -> Tensor:
    """Returns the value of `LABEL_POSITIONS` for rows of at most `width` labels each."""
    places = [np.flatnonzero(row != IGNORED_LABEL) for row in labels]
    step = max(width // STEPS, 1)
    most = max(max((len(row) for row in places), default=0), 1)
    found = np.full((len(places), min(-(-most // step) * step, width)), -1, np.int64)
    for index, row in enumerate(places):
        found[index, : len(row)] = row
    return torch.from_numpy(found)


def at_labels(hidden: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns hidden states (B, M, C) and labels (B, M) of the positions with a label; without the key those of all.

    Args:
        hidden: (B, T, C).
        batch: With `labels` (B, T).
    """
    labels: Tensor = batch["labels"]
    positions = batch.get(LABEL_POSITIONS)
    if positions is None:
        return hidden, labels
    inside = (positions >= 0) & (positions < hidden.shape[1])  # rows may have been cut since
    positions = positions.where(inside, 0)
    chosen = labels.gather(1, positions).masked_fill(~inside, IGNORED_LABEL)
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[2])), chosen
