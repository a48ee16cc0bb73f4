"""Lets the precision and the callbacks of a run change a network that was just built."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from core.contracts import ChangesNetwork, Network

__all__ = ["apply_network_changes"]


def apply_network_changes(network: Network, trainer: Trainer) -> Network:
    """Returns a network that was just built, changed in place by the precision and the callbacks that do so.

    Those that offer `core.contracts.ChangesNetwork`, which says when it happens.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for part in (trainer.precision_plugin, *callbacks):
        if isinstance(part, ChangesNetwork):
            part.change_network(network)
    return network
