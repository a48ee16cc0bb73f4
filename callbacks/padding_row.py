"""Keeps the embedding of the padding token at zero."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from toolkit.initial_values import clear_row
from toolkit.shards import HoldsParts


@technique(
    paper="nn.Embedding(padding_idx) of torch; here also for the weight of a tied head and for shards",
    before=["GradientClip"],
    offers=("keeps_weights",),
)
class PaddingRow(Callback):
    """Begins with zeros in the embedding's row of one token, and keeps them: the row's gradient is set to zero in each step.

    With tied embeddings the logit of that token is then 0, and the gradient from the head is set to zero, too. The row
    stays zero with optimizers that treat every weight by itself, such as AdamW.

    Args:
        padding_id: The token's id.

    Raises:
        ConfigError: If the id is not within the network's vocabulary, or the network has no embedding of it.

    Example:
        trainer:
          callbacks+:
            - class_path: PaddingRow
              init_args: {padding_id: 0}
    """

    def __init__(self, padding_id: int = 0) -> None:
        if padding_id < 0:
            raise ConfigError(f"PaddingRow: padding_id is {padding_id}; it must be at least 0.")
        self.padding_id = padding_id
        self._weights: list[Tensor] = []

    def change_network(self, network: Network) -> None:
        """Sets the row to zero."""
        if self.padding_id >= network.vocab_size:
            raise ConfigError(
                f"PaddingRow: padding_id is {self.padding_id}, and the network's vocab_size {network.vocab_size}."
            )
        weights = embeddings(network)
        if not weights:
            raise ConfigError(f"PaddingRow: {type(network).__name__} has no nn.Embedding of its vocabulary.")
        for weight in weights:
            clear_row(weight, self.padding_id)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the embeddings, which a strategy may have sharded; some stages of a pipeline have none."""
        network: Any = pl_module.network
        self._weights = embeddings(network)
        if isinstance(trainer.strategy, HoldsParts):  # it takes gradients away as backward computes them
            for weight in self._weights:
                weight.register_hook(lambda gradient: gradient * _all_but(gradient, self.padding_id))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Sets the row's gradient to zero, before it is measured and clipped."""
        for weight in self._weights:
            if weight.grad is not None:
                weight.grad.mul_(_all_but(weight.grad, self.padding_id))


def embeddings(network: Network) -> list[Tensor]:
    """Returns the weights with an embedding for each token id."""
    return [
        module.weight
        for module in network.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == network.vocab_size
    ]


def _all_but(gradient: Any, row: int) -> Tensor:
    """Returns ones with a zero in one row, (V, 1), as a DTensor where the gradient is one."""
    kept: Any = torch.ones(len(gradient), 1, dtype=gradient.dtype, device=gradient.device)
    kept[row] = 0.0
    if hasattr(gradient, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = gradient.device_mesh
        kept = DTensor.from_local(kept, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = kept
    return found
