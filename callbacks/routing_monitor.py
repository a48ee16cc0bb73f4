"""Logs how evenly the experts of a mixture are used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from core.training.loss_ranks import sum_over
from toolkit.routing import RoutesTokens, all_routers, count_experts, count_loads

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected


@technique(
    paper="Switch Transformer, arXiv:2101.03961, section 2.2 (load); entropy as in OLMoE, arXiv:2409.02060",
    observer=True,
)
class RoutingMonitor(Callback):
    """How the tokens of a logged optimizer step chose experts, over all its micro-batches and ranks.

    The load of an expert is its share of a layer's choices times E: 1 where all are used alike, 0 where it is not used.
    Logged are `routing/max_load` and `routing/min_load` over all layers and experts, `routing/entropy`, that of the shares
    over log E in the mean layer, 1 where all are used alike, and `routing/dropped`, the share of choices that found no
    room. Other steps count nothing.

    Raises:
        ConfigError: If the network has no experts.

    Example:
        model:
          network:
            class_path: Dots1
            init_args: {vocab_size: 2048, n_layer: 2, n_head: 4, n_kv_head: 2, n_embd: 64, intermediate_size: 128, n_experts: 8, experts_per_token: 2, expert_size: 32, max_sequence_length: 256}
        trainer:
          callbacks+: [{class_path: RoutingMonitor}]
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error where no process has all layers."""
        stages = [item for item in run.selected if (item.arguments.get("pipeline") or 1) > 1]
        if stages and stages[0].name == "HybridParallel":
            yield "RoutingMonitor counts the layers of one process: set pipeline to 1, or leave it out"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes room for the counts."""
        network: Any = pl_module.network
        if not isinstance(network, RoutesTokens):
            raise ConfigError(f"RoutingMonitor: {type(network).__name__} has no experts; Mixtral has.")
        layers, experts = len(all_routers(network)), count_experts(network)
        self._counts = torch.zeros(layers, experts + 1, dtype=torch.int64, device=pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count with the first micro-batch of a step that will be logged."""
        due = not (trainer.global_step + 1) % trainer.log_every_n_steps  # type: ignore[attr-defined]
        if due and not self._handles:
            self._counts.zero_()
            network: Any = pl_module.network
            self._handles = count_loads(network, self._counts[:, :-1], self._counts[:, -1])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures of the step."""
        if pl_module.logging_step and self._handles:
            self._stop()
            counts = sum_over(trainer, self._counts).double().cpu()
            log_figures(trainer, figures(counts[:, :-1], counts[:, -1]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops listening."""
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def figures(loads: torch.Tensor, dropped: torch.Tensor) -> dict[str, float]:
    """Returns what is logged, given choices (L, E), of which (L,) found no room."""
    n_experts = loads.shape[1]
    shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
    entropy = -torch.xlogy(shares, shares).sum(1).mean() / math.log(max(n_experts, 2))
    return {
        "routing/max_load": float(shares.max() * n_experts),
        "routing/min_load": float(shares.min() * n_experts),
        "routing/entropy": float(entropy),
        "routing/dropped": float(dropped.sum() / loads.sum().clamp(min=1)),
    }
