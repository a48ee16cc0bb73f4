"""Quantises the weights of a network for generation."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from core.errors import ConfigError
from toolkit.sizes import readable


def quantize(network: Any, kind: Literal["int8", "nf4"]) -> str:
    """Replaces the linear layers of a network's blocks by quantised ones; returns what that saves.

    int8: 255 levels, scaled to the largest value of each row. nf4: 16 values, scaled to the largest of each 64 weights.
    Embeddings, norms, biases and the output head stay as they are.

    Args:
        network: On the CPU.
        kind: The data type of the weights.

    Raises:
        ConfigError: If there is nothing to quantise.
    """
    # imported, it warns on some CPUs that the package `kernels`, which it could use, is not there
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from plugins.precision.frozen_linear import frozen
    from plugins.precision.layers import linear_layers

    chosen = {
        name: layer
        for name, layer in linear_layers(network, None, "--quantize").items()
        if type(layer) is nn.Linear
    }
    if not chosen:
        raise ConfigError(f"--quantize {kind}: {type(network).__name__} has no linear layers in its blocks.")
    whole = sum(parameter.nbytes for parameter in network.parameters())
    before = sum(layer.weight.nbytes for layer in chosen.values())
    after = 0
    for name, layer in chosen.items():
        quantised = frozen(layer, kind, double_quantization=False)
        network.set_submodule(name, quantised)
        after += _bytes(quantised.weight)
    return (
        f"{kind}: {len(chosen)} linear layers take {readable(after, binary=True)} instead of {readable(before, binary=True)}, "
        f"all weights {readable(whole - before + after, binary=True)} instead of {readable(whole, binary=True)}"
    )


def _bytes(weight: Any) -> int:
    """Returns the size of a quantised weight and its scales."""
    scales = weight.quant_state.absmax if hasattr(weight, "quant_state") else weight.SCB
    return weight.nbytes + scales.nbytes
