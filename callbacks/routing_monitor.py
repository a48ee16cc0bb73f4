"""Logs how evenly the experts of a mixture are used."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from core.errors import ConfigError
from core.technique import technique
from core.training.figures import log_figures
from core.training.loss_ranks import dp_size
from toolkit.further_blocks import further_blocks
from toolkit.routing import RoutesTokens, all_routers, count_experts, count_loads


@technique(
    paper="Switch Transformer, arXiv:2101.03961, section 2.2 (load); entropy as in OLMoE, arXiv:2409.02060",
    observer=True,
)
class RoutingMonitor(Callback):
    """How the tokens of a logged optimizer step chose experts, over all its micro-batches and ranks.

    The load of an expert is its share of a layer's choices times E: 1 where all are used alike, 0 where it is not used.
    Logged are `routing/max_load` and `routing/min_load` over all layers and experts, `routing/entropy`, that of the shares
    over log E in the mean layer, 1 where all are used alike, and `routing/dropped`, the share of choices that found no
    room. Other steps count nothing. Stages of a pipeline count their own layers; the figures are those of all.

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
        self._handles: list[Any] | None = None  # an empty list listens, too: of a stage without routers

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes room for the counts of this rank's layers; a stage of a pipeline may have none with experts."""
        network: Any = pl_module.network
        routers = all_routers(network) if isinstance(network, RoutesTokens) else []
        device = pl_module.device
        own = torch.tensor(count_experts(network) if routers else 0, device=device)
        experts = int(torch.as_tensor(pl_module.all_gather(own)).max())
        if not experts:
            raise ConfigError(f"RoutingMonitor: {type(network).__name__} has no experts; Mixtral has.")
        blocks = [*network.blocks, *further_blocks(network)]
        places = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
        self._blocks = torch.tensor([places[id(router)] for router in routers], device=device).long()
        self._counts = torch.zeros(len(routers), experts + 1, dtype=torch.int64, device=device)
        held = self._sum(trainer, torch.ones_like(self._counts), len(blocks))
        self._copies = held // dp_size(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count with the first micro-batch of a step that will be logged."""
        due = not (trainer.global_step + 1) % trainer.log_every_n_steps  # type: ignore[attr-defined]
        if due and self._handles is None:
            self._counts.zero_()
            network: Any = pl_module.network
            self._handles = count_loads(network, self._counts[:, :-1], self._counts[:, -1])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures of the step."""
        if pl_module.logging_step and self._handles is not None:
            self._stop()
            # The ranks that have the same tokens and layer, as in tensor parallelism, have counted the same.
            counts = self._sum(trainer, self._counts, len(self._copies)) // self._copies.clamp(min=1)
            counts = counts[self._copies[:, 0] > 0].double().cpu()
            log_figures(trainer, figures(counts[:, :-1], counts[:, -1]))

    def _sum(self, trainer: Trainer, values: torch.Tensor, blocks: int) -> torch.Tensor:
        """Returns the sum over all ranks of values of this rank's layers, as rows of the blocks of the whole network."""
        total = values.new_zeros(blocks, values.shape[1]).index_add_(0, self._blocks, values)
        if trainer.world_size > 1:
            total = trainer.strategy.reduce(total, reduce_op="sum")  # type: ignore[assignment]
        return total

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops listening."""
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles or ():
            handle.remove()
        self._handles = None


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
