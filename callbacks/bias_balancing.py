"""Balances the experts of a mixture without a loss: a bias for the choice follows the load."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from core.errors import ConfigError
from core.lightning_compat import is_accumulating
from core.technique import technique
from core.training.loss_ranks import sum_over
from toolkit.routing import RoutesTokens, all_routers, count_loads


@technique(
    paper="Auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, 2.1.2"
)
class BiasBalancing(Callback):
    """Moves the bias by which experts are chosen after each optimizer step: up where an expert had few tokens, else down.

    The bias of expert e of a layer changes by `rate` times the sign of (mean load - load of e), with loads counted over all
    micro-batches and ranks of the step, padding included. It has no part in the weights of the experts' outputs, and no
    gradient. It is a buffer of the network and is saved with its weights. Nothing waits for the device.

    Args:
        rate: Change of a bias in a step; 0.001 in DeepSeek-V3, where scores are sigmoids.

    Raises:
        ConfigError: If `rate` is not above 0, or the network's routers have no bias.

    Example:
        model:
          network:
            class_path: Dots1
            init_args: {vocab_size: 2048, n_layer: 2, n_head: 4, n_kv_head: 2, n_embd: 64, intermediate_size: 128, n_experts: 8, experts_per_token: 2, expert_size: 32, max_sequence_length: 256}
        trainer:
          callbacks+:
            - class_path: BiasBalancing
              init_args: {rate: 0.001}
    """

    def __init__(self, rate: float = 0.001) -> None:
        if not 0 < rate < float("inf"):
            raise ConfigError(f"BiasBalancing: rate is {rate}; it must be above 0.")
        self.rate = rate
        self._handles: list[Any] = []
        self._loads = torch.zeros(0, 0, dtype=torch.int64)
        self._begins = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens to the routers."""
        network: Any = pl_module.network
        self._biases = _biases(network)
        sizes = len(self._biases), self._biases[0].shape[0] if self._biases else 0
        self._loads = torch.zeros(sizes, dtype=torch.int64, device=pl_module.device)
        self._handles = count_loads(network, self._loads, torch.zeros_like(self._loads[:, :1]))
        self._begins = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count with the first micro-batch of a step."""
        if self._begins:  # trial steps of others have been counted, too
            self._loads.zero_()
        self._begins = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the biases after the optimizer's step."""
        if is_accumulating(trainer):
            return
        self._begins = True
        if not self._biases:  # of a pipeline's stage
            return
        loads = sum_over(trainer, self._loads).double()
        steps = self.rate * (loads.mean(1, keepdim=True) - loads).sign()
        for bias, step in zip(self._biases, steps, strict=True):
            bias.add_(step.to(bias.dtype))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _biases(network: Any) -> list[Tensor]:
    if not isinstance(network, RoutesTokens):
        raise ConfigError(f"BiasBalancing: {type(network).__name__} has no experts; Dots1 has.")
    found = [getattr(router, "e_score_correction_bias", None) for router in all_routers(network)]
    if any(bias is None for bias in found):
        raise ConfigError(
            f"BiasBalancing: the routers of {type(network).__name__} choose without a bias; those of Dots1 have one.\n"
            "Take --model.objective=BalancedRouting, which balances with a loss."
        )
    return [bias for bias in found if bias is not None]
