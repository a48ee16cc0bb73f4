"""Weights from elsewhere, as training starts."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback


class Weights(Callback):
    """Puts weights into the network before the first step of a run.

    Args:
        path: A state dict of the module.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Does it."""
        pl_module.load_state_dict(torch.load(self.path, weights_only=True))
