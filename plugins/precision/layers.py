"""What precisions ask of a run: which device it is on, which of a network's layers are meant."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from core.contracts import Network
from core.errors import ConfigError, nearest


def run_device(model: Any) -> str:
    """Returns "cpu" or "cuda": the kind of device on which a strategy runs its model, wrapped or not."""
    module = model if isinstance(model, LightningModule) else model.module
    return str(module.trainer.strategy.root_device.type)


def linear_layers(network: Network, patterns: Sequence[str] | None, who: str) -> dict[str, nn.Linear]:
    """Returns linear layers by their full names.

    Args:
        network: Their network.
        patterns: What the names match, with `*` and `?`; None: all layers in the network's blocks, so that the
            output head is none of them.
        who: The technique that asks, for the message.

    Raises:
        ConfigError: If a pattern matches none.
    """
    found = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    if patterns is None:
        inside = {id(layer) for block in network.blocks for layer in block.modules()}
        return {name: layer for name, layer in found.items() if id(layer) in inside}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ConfigError(
                f"{who}: no linear layer of {type(network).__name__} is named {pattern!r}."
                f"{nearest(pattern, set(found))} It has, for example, {', '.join([*found][-3:]) or 'none'}."
            )
    return {name: layer for name, layer in found.items() if any(fnmatchcase(name, p) for p in patterns)}
