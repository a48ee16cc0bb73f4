"""SIGTERM on any rank ends all of them after the same optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class SharedSigterm:
    """Replaces Lightning's way, which waits for the device at each step and broadcasts within the signal handler.

    A signal is noted; the ranks add up their notes where figures are logged, and Lightning ends the run at the
    end of that batch. Made when training starts on more than one rank; Lightning puts the old handlers back.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.received = trainer, False
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if not self.received and self.trainer.strategy.launcher is not None:
            self.trainer.strategy.launcher.kill(number)  # the ranks that this process has started
        self.received = True

    def agree(self, reduce: Callable[..., Tensor], device: torch.device) -> None:
        """Ends the run on every rank if one has been told to end."""
        if reduce(torch.tensor(float(self.received), device=device), reduce_op="sum") > 0:
            self.trainer._signal_connector.received_sigterm = True
