"""Which figure of a step lies far above those of the last steps, decided on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """The last values of some figures, and whether new ones lie beyond `sigma` deviations above their mean.

    Nothing waits for the device. An outlier enters the window as the limit that it exceeded: one does not hide the
    next, and a figure that stays higher is accepted in time. One that is not finite enters as the value before it.

    Args:
        figures: How many figures a step has.
        window: Steps of history; no limit is known before it is full.
        sigma: Standard deviations above the mean that make the limit.

    Attributes:
        steps: Steps taken in so far.
        history: (figures, window), float32.
    """

    def __init__(self, figures: int, window: int, sigma: float) -> None:
        self.sigma, self.steps = sigma, 0
        self.history = torch.zeros(figures, window)

    def to(self, device: torch.device) -> None:
        """Moves the window."""
        self.history = self.history.to(device)

    def stack(self, *figures: Tensor) -> Tensor:
        """Returns figures (0-d each) as one tensor (figures,) of the window's type and device."""
        return torch.stack([figure.to(self.history) for figure in figures])

    def last(self) -> Tensor:
        """Returns what entered last, (figures,); zeros before the first."""
        return self.history[:, (self.steps - 1) % self.history.shape[1]]

    def take(self, figures: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the figures of a step in, (figures,).

        Returns:
            Whether any is an outlier or not finite (0-d, boolean), and the limits that held (figures,), infinite while
            there is none.
        """
        finite = figures.isfinite()
        noted, outlier = torch.where(finite, figures, self.last()), ~finite.all()
        limits = torch.full_like(noted, torch.inf)
        if self.steps >= self.history.shape[1]:
            deviation, mean = torch.std_mean(self.history, dim=1)
            limits = mean + self.sigma * deviation
            outlier = outlier | (noted > limits).any()
            noted = torch.minimum(noted, limits)
        self.history[:, self.steps % self.history.shape[1]] = noted
        self.steps += 1
        return outlier, limits

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, on the host."""
        return {"steps": self.steps, "history": self.history.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a saved window; one of another length is not taken over."""
        if state["history"].shape == self.history.shape:
            self.steps, self.history = state["steps"], state["history"].to(self.history.device, copy=True)
