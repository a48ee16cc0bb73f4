"""Causes by which a run differs from another of the same configuration: planted by an environment variable."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

VARIABLE = "LEYDEN_TEST_PLANT"


class Planted(Callback):
    """Does what the variable says, in JSON; without it nothing.

    Its entries: `kind` is "weight", "token" or "order"; `step`, from 1; of weights `name` and `index`, and `late`, whether it
    is changed after the step; of tokens `key`, `row` and `position`; of orders `module`, a linear layer.
    """

    def __init__(self) -> None:
        self.plant: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
        self.done = False

    def _due(self, trainer: Any, kind: str, late: bool = False) -> bool:
        plant, step = self.plant, trainer.global_step + (not late)
        due = plant.get("kind") == kind and plant["step"] == step and plant.get("late", False) == late
        return due and not self.done

    def _flip(self, module: Any) -> None:
        weights = dict(module.named_parameters())[self.plant["name"]].detach().view(-1).view(torch.int32)
        weights[self.plant["index"] % len(weights)] ^= 1 << self.plant.get("bit", 12)
        self.done = True

    def on_train_start(self, trainer, pl_module):
        if self.plant.get("kind") == "weight" and self.plant["step"] == 0 == trainer.global_step:
            self._flip(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self._due(trainer, "weight"):
            self._flip(pl_module)
        if self._due(trainer, "token"):
            key, row, position = (self.plant[name] for name in ("key", "row", "position"))
            batch[key] = batch[key].clone()
            batch[key][row, position] = (batch[key][row, position] + 1) % 64
            self.done = True
        if self._due(trainer, "order"):
            sum_by_halves(pl_module.get_submodule(self.plant["module"]))
            self.done = True

    def on_train_batch_end(self, trainer, pl_module, *_):
        if self._due(trainer, "weight", late=True):
            self._flip(pl_module)


def sum_by_halves(layer: nn.Linear) -> None:
    """Has a linear layer compute its products as the sum of two halves of its inputs."""
    middle = layer.in_features // 2

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        first = inputs[..., :middle] @ layer.weight[:, :middle].T
        second = inputs[..., middle:] @ layer.weight[:, middle:].T
        total = second + first
        return total if layer.bias is None else total + layer.bias

    layer.forward = forward  # type: ignore[method-assign]
