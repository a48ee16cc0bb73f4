"""What the precision techniques share: the device of the run, the selection of linear layers by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError, nearest


def run_device(model: Any) -> str:
    """Returns "cpu" or "cuda", the device type of the strategy that runs a model, wrapped or not."""
    module = model if isinstance(model, LightningModule) else model.module
    return str(module.trainer.strategy.root_device.type)


def linear_layers(network: Network, patterns: Sequence[str] | None, who: str) -> dict[str, nn.Linear]:
    """Returns linear layers by their full names.

    Args:
        network: The network.
        patterns: Patterns for names, with `*` and `?`; None: all layers in the network's blocks, and so not the
            output head.
        who: The name of the technique, for the message.

    Raises:
        ConfigError: If a pattern matches no layer.
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


def is_quantised(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer with quantised weights."""
    return isinstance(module, nn.Linear) and not module.weight.is_floating_point()


def weight_of(layer: nn.Linear) -> Tensor:
    """Returns the detached weight (out, in) of a linear layer in at least float32, dequantised if it is quantised."""
    weight = layer.weight.detach()
    if weight.is_floating_point():
        return weight.to(torch.promote_types(weight.dtype, torch.float32))
    from plugins.precision.frozen_linear import dequantised

    return dequantised(layer)


def wide_type(layer: nn.Linear) -> torch.dtype:
    """Returns the data type of what is trained beside a layer's weights: float32, or theirs if that is wider."""
    weight = layer.weight
    return torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32


def make_dense(network: nn.Module, name: str, weight: Tensor) -> None:
    """Gives a linear layer a weight (out, in): the layer stays, or becomes an `nn.Linear` if it is quantised."""
    layer: Any = network.get_submodule(name)
    if layer.weight.is_floating_point():
        layer.weight.data.copy_(weight)
        return
    with torch.device("meta"):
        dense = nn.Linear(layer.in_features, layer.out_features, bias=False)
    dense.weight, dense.bias = nn.Parameter(weight), layer.bias
    network.set_submodule(name, dense.train(layer.training))
