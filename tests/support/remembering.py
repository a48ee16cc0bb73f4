"""A network that saves more than its weights, as layers in 8 bits do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plugins.networks.gpt import GPT


class Calls(nn.Module):
    """Counts in a dict; or in a tensor that grows with each."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.number, self.grows = 0, grows

    def get_extra_state(self) -> Any:
        return torch.zeros(self.number, dtype=torch.uint8) if self.grows else {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = len(state) if self.grows else state["number"]


class RememberingGPT(GPT):
    """A GPT with a counter beside its blocks.

    Args:
        grows: Whether the counter is saved as a tensor that grows.
        options: Of the GPT.
    """

    def __init__(self, grows: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.calls = Calls(grows)
