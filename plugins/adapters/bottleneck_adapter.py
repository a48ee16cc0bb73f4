"""Small layers behind attention and MLP of each block."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from toolkit.adapters import Adapter, change_layer
from toolkit.initial_values import start_added, uniform

PLACES = {"both": ("attention", "mlp"), "mlp": ("mlp",)}


class Bottleneck(nn.Module):
    """A module (..., C) -> (..., C) behind which are a map to r features, GELU, and one back, added to its output.

    Attributes:
        bottleneck_down: (r, C), float32, and its bias (r,).
        bottleneck_up: (C, r), float32, and its bias (C,).
    """

    bottleneck_down: Tensor
    bottleneck_down_bias: Tensor
    bottleneck_up: Tensor
    bottleneck_up_bias: Tensor

    def add(self, width: int, size: int) -> None:
        """Adds the parameters, without values for the first map: both together are 0 at first."""
        device = next(self.parameters()).device
        self.bottleneck_down = nn.Parameter(torch.empty(size, width, device=device))
        self.bottleneck_down_bias = nn.Parameter(torch.zeros(size, device=device))
        self.bottleneck_up = nn.Parameter(torch.zeros(width, size, device=device))
        self.bottleneck_up_bias = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the module's output with the map of it added."""
        y: Tensor = super().forward(*args, **kwargs)
        inner = F.linear(y.to(self.bottleneck_down.dtype), self.bottleneck_down, self.bottleneck_down_bias)
        return y + F.linear(F.gelu(inner), self.bottleneck_up, self.bottleneck_up_bias).to(y.dtype)


@technique(
    paper="Houlsby et al., arXiv:1902.00751, section 2.1, figure 2; behind the MLP alone: Pfeiffer et al., arXiv:2005.00247, "
    "section 3.3",
    offers=("keeps_weights",),
)
class BottleneckAdapter(Adapter):
    """Trains small layers behind attention and MLP of each block: y + U gelu(D y + b) + c, with D (r, C) and U (C, r).

    U and c are 0 at first, so that training starts from the base. `places: both` is Houlsby's, before what attention and MLP return is
    added to the residual stream: 2 (2 r C + r + C) parameters a block; `mlp` is Pfeiffer's, half as many. It takes any network whose
    blocks have attention (or another mixer of that name) and an MLP, and cannot be merged into the weights.

    Args:
        size: r.
        places: "both", or "mlp".

    Raises:
        ConfigError: If `size` is below 1, or blocks of the network have other parts.

    Example:
        trainer:
          callbacks+:
            - class_path: BottleneckAdapter
              init_args: {size: 16, places: both}
    """

    def __init__(self, size: int = 16, places: Literal["both", "mlp"] = "both") -> None:
        if size < 1:
            raise ConfigError(f"BottleneckAdapter: size is {size}; it must be at least 1.")
        if places not in PLACES:
            raise ConfigError(f"BottleneckAdapter takes places=both or places=mlp, not {places!r}.")
        self.size, self.places = size, places

    def adapt(self, network: Network) -> None:
        """Adds the layers to each block."""
        weight = network.output_weight
        for index, block in enumerate(network.blocks):
            for name in PLACES[self.places]:
                part = getattr(block, name, None)
                if weight is None or not isinstance(part, nn.Module):
                    raise ConfigError(
                        f"BottleneckAdapter: {type(network).__name__} has a block without {name}, or returns logits. Take a decoder such as "
                        "Llama; or LoRA."
                    )
                width = weight.shape[1]
                change_layer(part, Bottleneck).add(width, self.size)
                bound = width**-0.5
                for leaf, added in part.named_parameters(recurse=False):
                    if leaf.startswith("bottleneck_"):
                        start = uniform(-bound, bound) if leaf == "bottleneck_down" else 0.0
                        start_added(added, start, network, f"{index}.{name}.{leaf}")
