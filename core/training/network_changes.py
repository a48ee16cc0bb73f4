"""Lets the objective, the precision and the callbacks of a run change a network that was just built."""

from __future__ import annotations

from lightning.pytorch import Trainer

from core import catalog
from core.contracts import ChangesNetwork, Network

__all__ = ["apply_network_changes"]


def apply_network_changes(network: Network, trainer: Trainer, weights: str | None = None) -> Network:
    """Returns a network that was just built, changed in place by the objective, the precision and the callbacks that do so.

    Those that offer `core.contracts.ChangesNetwork`, which says when it happens.

    Args:
        network: On the meta device no weights are read; names and shapes are compared.
        trainer: The trainer of the run.
        weights: What is read into the network before that; see `LanguageModule`.
    """
    if weights:
        catalog.offering("initial_weights", "data").load()(weights).change_network(network, trainer)
    # objectives may hold others; a run that is only checked has no module yet
    objectives = trainer.lightning_module.objective.modules() if trainer.lightning_module else ()  # type: ignore[union-attr, operator]
    for part in (*objectives, trainer.precision_plugin, *trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(part, ChangesNetwork):
            part.change_network(network)
    return network
