"""Which figure of a step lies far above those of the last steps, decided on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """The last values of some figures, and whether new ones lie beyond `sigma` deviations above their mean.

    Nothing waits for the device. An outlier enters the window as the limit that it exceeded: one does not hide the
    next, and a figure that stays higher is accepted in time. A step with a figure that is not finite does not enter.

    Args:
        figures: How many figures a step has.
        window: Steps of history; there is no limit before it is full.
        sigma: Standard deviations above the mean that make the limit.
    """

    def __init__(self, figures: int, window: int, sigma: float) -> None:
        self.sigma = sigma
        self._steps = torch.zeros(1, dtype=torch.int64)
        self._history = torch.zeros(figures, window)

    def to(self, device: torch.device) -> None:
        """Moves the window."""
        self._steps, self._history = self._steps.to(device), self._history.to(device)

    def take(self, *figures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the figures of a step in, 0-d each.

        Returns:
            Whether any is an outlier or not finite (0-d, boolean), the figures (figures,), and the limits that held
            (figures,), infinite while there is none.
        """
        window = self._history.shape[1]
        now = torch.stack([figure.to(self._history) for figure in figures])
        deviation, mean = torch.std_mean(self._history, dim=1)
        limits = torch.where(self._steps < window, torch.inf, mean + self.sigma * deviation)
        finite, slot = now.isfinite().all(), self._steps % window
        noted = torch.where(finite, torch.minimum(now, limits), self._history.index_select(1, slot)[:, 0])
        self._history.index_copy_(1, slot, noted[:, None])
        self._steps = self._steps + finite
        return (now > limits).any() | ~finite, now, limits

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, on the host."""
        return {"steps": int(self._steps), "history": self._history.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a saved window; one of another length is not taken over."""
        if state["history"].shape == self._history.shape:
            self._steps = torch.full_like(self._steps, state["steps"])
            self._history = state["history"].to(self._history.device, copy=True)
