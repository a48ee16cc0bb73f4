"""Linear layers with a frozen weight that bitsandbytes keeps in 4 or 8 bits; biases train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from core.errors import ConfigError

Kind = Literal["nf4", "fp4", "int8"]


class Frozen4bit(bnb.nn.Linear4bit):
    """A `Linear4bit` that computes in autocast's dtype, keeps the dtype of its bias, and loads what it saves."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., in) to (..., out)."""
        # Not the forward of the base class: on some CPUs it repacks weights in eval mode, and it casts the bias.
        x = in_autocast(x)
        state = getattr(self.weight, "quant_state", None)
        if state is None:
            raise ConfigError(NOT_THERE)
        return with_bias(bnb.matmul_4bit(x, self.weight.t(), quant_state=state), self.bias)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        begin = f"{prefix}weight."
        statistics = {k.removeprefix(begin): v for k, v in state_dict.items() if k.startswith(begin)}
        if statistics:
            self.weight = bnb.nn.Params4bit.from_prequantized(
                torch.empty_like(self.weight), statistics, device=self.weight.device, module=self
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        unexpected = rest[3]  # after local_metadata, strict and missing_keys
        unexpected[:] = [key for key in unexpected if not key.startswith(begin)]


class Frozen8bit(bnb.nn.Linear8bitLt):
    """A `Linear8bitLt` that computes the same in evaluation as in training, and keeps the dtype of its bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., in) to (..., out)."""
        x = in_autocast(x)
        if getattr(self.weight, "CB", None) is not None:
            self.init_8bit_state()
        if self.state.CB is None:
            raise ConfigError(NOT_THERE)
        # Otherwise, on a CPU, bitsandbytes rounds activations to int8 in evaluation only.
        self.state.is_training = True
        return with_bias(bnb.matmul(x, self.weight, state=self.state), self.bias)

    def _apply(self, function: Any, recurse: bool = True) -> nn.Module:
        # Where a network is moved, torch moves the data of the parameter, and none of what bitsandbytes keeps beside it.
        super()._apply(function, recurse)
        weight: Any = self.weight
        holder: Any = weight if getattr(weight, "CB", None) is not None else self.state
        if holder.CB is not None:
            holder.CB, holder.SCB = weight.data, holder.SCB.to(weight.device)
        return self

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        weight: Any = self.weight  # an Int8Params
        if weight.CB is None:  # after the first use; the base class can only load before it
            weight.CB, weight.SCB = self.state.CB, self.state.SCB
            self.state.CB = self.state.SCB = None
        super()._load_from_state_dict(*given, **named)


NOT_THERE = (
    "BitsandbytesWeights: the weights were on the meta device when they were to be quantised.\n"
    "Use a strategy that builds the network on its device, such as ddp."
)


def frozen(layer: nn.Linear, kind: Kind, double_quantization: bool) -> nn.Module:
    """Returns a layer with the weight quantised on its device, and the same bias parameter.

    On the meta device nothing is quantised.
    """
    size, weight = (layer.in_features, layer.out_features), layer.weight.detach()
    start = weight if weight.is_meta else weight.cpu()  # `to` quantises tensors that come from the CPU
    result: Any
    with torch.device("meta"):
        if kind == "int8":
            result = Frozen8bit(*size, bias=False, has_fp16_weights=False)
            kept: Any = bnb.nn.Int8Params(start, requires_grad=False)
        else:
            result = Frozen4bit(*size, bias=False, quant_type=kind, compress_statistics=double_quantization)
            options = {"quant_type": kind, "compress_statistics": double_quantization, "module": result}
            kept = bnb.nn.Params4bit(start, requires_grad=False, **options)
    result.weight = kept if weight.is_meta else kept.to(weight.device)
    result.bias = layer.bias
    return result.train(layer.training)


def in_autocast(x: Tensor) -> Tensor:
    """Returns x in autocast's dtype, so that gradients have it, too."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Returns y (..., out) plus the bias, in y's dtype."""
    return y if bias is None else y + bias.to(y.dtype)


def dequantised(layer: Any) -> Tensor:
    """Returns the weight (out, in) of a quantised layer in float32."""
    weight = layer.weight
    if (state := getattr(weight, "quant_state", None)) is not None:
        return bnb.functional.dequantize_4bit(weight.data, state).float()
    rows, scales = (weight.CB, weight.SCB) if weight.CB is not None else (layer.state.CB, layer.state.SCB)
    return rows.float() * (scales.float() / 127)[:, None]
