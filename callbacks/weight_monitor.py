"""Norms of gradients, weights and updates: by block and by kind of weight."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from toolkit.network_parts import weight_groups
from toolkit.sharded_squares import ShardedSquares
from toolkit.update_history import UpdateHistory

FIGURES = ("gradient_norm", "weight_norm", "update_norm")


@technique(
    paper="update-to-weight ratio: Karpathy, CS231n, 'ratio of weights to updates' (about 1e-3); by layer: LARS, arXiv:1708.03888",
    before=("SkipStep", "GradientClip"),
    observer=True,
)
class WeightMonitor(Callback):
    """Logs 2-norms of gradients, weights and updates, of each block and of each kind of weight.

    In every `every_n_steps`th optimizer step: `gradient_norm/<group>`, before clipping; `weight_norm/<group>`, before the
    step; `update_norm/<group>`, of the weights after the step minus those before it; and `update_ratio/<group>`, update
    over weight, unless the weights are zero. Groups are `block.<i>`; `attention`, `mlp`, `norm` and `router`, each over all
    blocks; `embedding` and `head`. Tied embeddings are of `embedding` alone, the last norm is of no group. Only weights that
    are trained count. Which modules are attention or MLP the network says (`toolkit.network_parts`); of one that does not,
    blocks and ends are logged. SpikeReport says by these figures which block left its band before a spike.

    Norms are those of the full model under every strategy: each rank adds the squares of its shards, divided by the number
    of ranks that have the same ones. A monitored step takes memory for one more copy of the rank's weights. All other
    steps cost nothing.

    Args:
        every_n_steps: Optimizer steps between two that are monitored.
        detail: Whether each kind is also logged in each block, as `block.<i>.attention` and so on.

    Raises:
        ConfigError: If `every_n_steps` is below 1.

    Example:
        trainer:
          callbacks+:
            - class_path: WeightMonitor
              init_args: {every_n_steps: 50}
    """

    def __init__(self, every_n_steps: int = 50, detail: bool = False) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"WeightMonitor takes every_n_steps >= 1, not {every_n_steps}.")
        self.every_n_steps, self.detail = every_n_steps, detail
        self._norms: ShardedSquares | None = None
        self._before: list[Tensor] | None = None
        self._squares: list[Tensor] = []
        self.update_history: UpdateHistory | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks the network for its groups, and counts on how many ranks each weight is."""
        network: Any = pl_module.network
        self._norms = ShardedSquares(weight_groups(network, self.detail), pl_module.device, trainer.strategy)
        blocks = [group for group in self._norms.groups if re.fullmatch(r"block\.\d+", group)]
        self.update_history = UpdateHistory(blocks)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures gradients and weights of a step that is due, and keeps the weights."""
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        assert self._norms is not None
        weights = self._norms.weights()
        self._squares = [self._norms.sums(self._norms.gradients()), self._norms.sums(weights)]
        self._before = [weight.clone() for weight in weights]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the update and logs the step."""
        if self._before is None or self._norms is None:
            return
        updates, self._before = self._before, None
        with torch.no_grad():
            if updates:
                torch._foreach_sub_(updates, self._norms.weights())
            sums = torch.stack([*self._squares, self._norms.sums(updates)])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[assignment]
        found = figures(self._norms.groups, sums.sqrt())
        log_figures(trainer, found)
        if self.update_history is not None:
            named = [f"update_ratio/{block}" for block in self.update_history.blocks]
            ratios = [
                math.inf if math.isnan(found.get(name, 0.0)) else found.get(name, math.nan) for name in named
            ]
            self.update_history.add(trainer.global_step, ratios)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Frees the copy where a step breaks off."""
        self._before = None


def figures(groups: list[str], norms: Tensor) -> dict[str, float]:
    """Returns what is logged, given the norms (3, groups) of gradients, weights and updates."""
    found = {
        f"{name}/{group}": value
        for name, row in zip(FIGURES, norms.tolist(), strict=True)
        for group, value in zip(groups, row, strict=True)
    }
    for group in groups:
        if weight := found[f"weight_norm/{group}"]:
            found[f"update_ratio/{group}"] = found[f"update_norm/{group}"] / weight
    return found
