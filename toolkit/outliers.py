"""Outliers among the figures of the last steps, found on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """The last values of some figures, and whether new ones are more than `sigma` deviations above their mean.

    The host does not wait for the device. An outlier enters the window as the limit that it exceeded: it does not hide the
    next one, and a figure that stays higher is accepted in time. A step with a figure that is not finite does not
    enter.

    Args:
        figures: How many figures a step has.
        window: Steps of history; there is no limit before it is full.
        sigma: Standard deviations above the mean that make the limit.
        rises: Of each figure, how far the limit is above the mean at least, as a share of the mean; none: 0.
    """

    def __init__(self, figures: int, window: int, sigma: float, rises: Sequence[float] = ()) -> None:
        self.sigma = sigma
        self._rises = torch.tensor([*rises] or [0.0] * figures)
        self._steps = torch.zeros(1, dtype=torch.int64)
        self._history = torch.zeros(figures, window)

    def to(self, device: torch.device) -> None:
        """Moves the window."""
        self._steps, self._history = self._steps.to(device), self._history.to(device)
        self._rises = self._rises.to(device)

    def take(self, *figures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the figures of a step, each 0-d.

        Returns:
            Whether any is an outlier or not finite (0-d, boolean), the figures (figures,), and their limits
            (figures,), infinite while there is none.
        """
        window = self._history.shape[1]
        now = torch.stack([figure.to(self._history) for figure in figures])
        deviation, mean = torch.std_mean(self._history, dim=1)
        above = torch.maximum(self.sigma * deviation, self._rises * mean.abs())
        limits = torch.where(self._steps < window, torch.inf, mean + above)
        finite, slot = now.isfinite().all(), self._steps % window
        noted = torch.where(finite, torch.minimum(now, limits), self._history.index_select(1, slot)[:, 0])
        self._history.index_copy_(1, slot, noted[:, None])
        self._steps = self._steps + finite
        return (now > limits).any() | ~finite, now, limits

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, on the host."""
        return {"steps": int(self._steps), "history": self._history.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved window; one of another length is not used."""
        if state["history"].shape == self._history.shape:
            self._steps = torch.full_like(self._steps, state["steps"])
            self._history = state["history"].to(self._history.device, copy=True)
