"""Low-rank updates of linear layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from plugins.adapters.peft_folder import PeftFolder, form, layer_of
from plugins.precision.layers import linear_layers, make_dense, weight_of, wide_type
from toolkit.adapters import Adapter, change_layer, restore_layer
from toolkit.initial_values import start_added, start_as_norms, uniform

NAMES = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Parameters of a layer, as peft names them."""


class LoRALinear(nn.Linear):
    """A linear layer, possibly with quantised weights, to whose output a low-rank map of its input is added.

    Attributes:
        lora_A: (r, in), in at least float32.
        lora_B: (out, r), in at least float32.
        lora_magnitude_vector: (out,), DoRA's norms of the rows of the weight; None: LoRA.
        scaling: Of the low-rank map.
        dropout: Of its input.
    """

    lora_A: Tensor
    lora_B: Tensor
    lora_magnitude_vector: Tensor | None
    scaling: float
    dropout: float

    def add(self, rank: int, scaling: float, dropout: float, use_dora: bool) -> None:
        """Adds the parameters, without values for A: the map is 0 at first."""
        like: dict[str, Any] = {"device": self.weight.device, "dtype": wide_type(self)}
        self.scaling, self.dropout = scaling, dropout
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, **like))
        norms = nn.Parameter(weight_of(self).norm(dim=1)) if use_dora else None
        self.register_parameter("lora_magnitude_vector", norms)
        if norms is not None and norms.is_meta:
            start_as_norms(norms, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., in) to (..., out)."""
        y = super().forward(x)
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        inner = dropped.to(self.lora_A.dtype)
        update = F.linear(F.linear(inner, self.lora_A), self.lora_B) * self.scaling
        if self.lora_magnitude_vector is None:
            return y + update.to(y.dtype)
        weight = weight_of(self)
        norms = (weight + self.scaling * self.lora_B.detach() @ self.lora_A.detach()).norm(dim=1)
        factor = self.lora_magnitude_vector / norms  # section 4.3: gradients do not pass through the norms
        if dropped is x:
            plain = y if self.bias is None else y - self.bias.to(y.dtype)
        else:
            plain = F.linear(dropped, weight.to(dropped.dtype))
        return y + ((factor - 1) * plain + factor * update).to(y.dtype)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Returns the weight (out, in) with which a plain layer computes the same; in at least float32."""
        weight = weight_of(self)
        weight = weight + self.scaling * (self.lora_B.to(weight.dtype) @ self.lora_A.to(weight.dtype))
        if self.lora_magnitude_vector is None:
            return weight
        return weight * (self.lora_magnitude_vector.to(weight.dtype) / weight.norm(dim=1))[:, None]


@technique(
    paper="LoRA, arXiv:2106.09685, section 4.1; rsLoRA, arXiv:2312.03732; DoRA, arXiv:2402.09353; QLoRA, arXiv:2305.14314",
    offers=("keeps_weights",),
)
class LoRA(Adapter):
    """Trains a low-rank update of each linear layer: W x + s B A x, with B (out, r) and A (r, in).

    B is 0 at first, so that training starts from the base. s is alpha / r; with `use_rslora` alpha / sqrt(r), so that larger
    ranks learn as fast. With `use_dora` the rows of W + s B A are scaled to norms that are trained. A and B are float32,
    unless the precision is bf16-true. With BitsandbytesWeights this is QLoRA: W is kept in 4 or 8 bits.

    Args:
        rank: r.
        alpha: Numerator of s.
        layers: Patterns for names of linear layers, with `*` and `?`: "*.q_proj"; None: all in the network's blocks.
        dropout: Probability with which inputs of A are dropped.
        use_rslora: Whether s is alpha / sqrt(r).
        use_dora: Whether norms of rows are trained apart.
        weights: A folder that peft or `export --format peft` wrote, to start from; its layers, rank and scaling hold.

    Raises:
        ConfigError: If a number is out of range, a pattern matches no layer, or `weights` do not fit the network.

    Example:
        trainer:
          callbacks+:
            - class_path: LoRA
              init_args: {rank: 16, alpha: 32}
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        layers: list[str] | None = None,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        weights: str | None = None,
    ) -> None:
        if rank < 1:
            raise ConfigError(f"LoRA: rank is {rank}; it must be at least 1.")
        if not alpha > 0:
            raise ConfigError(f"LoRA: alpha is {alpha}; it must be above 0.")
        if not 0 <= dropout < 1:
            raise ConfigError(f"LoRA: dropout is {dropout}; it must be at least 0 and below 1.")
        self.rank, self.alpha, self.layers, self.dropout = rank, alpha, layers, dropout
        self.use_rslora, self.use_dora, self.weights = use_rslora, use_dora, weights

    def adapt(self, network: Network) -> None:
        """Adds A and B to linear layers."""
        if self.weights is not None:
            self._adapt_to(PeftFolder(self.weights), network)
            return
        chosen = linear_layers(network, self.layers, "LoRA")
        if not chosen:
            raise ConfigError(
                f"LoRA: {type(network).__name__} has no linear layers in its blocks. Name some in layers."
            )
        for name, layer in chosen.items():
            changed = self._change(layer, self.rank)
            bound = layer.in_features**-0.5  # as peft and the paper's code
            start_added(changed.lora_A, uniform(-bound, bound), network, f"{name}.lora_A")
            start_added(changed.lora_B, 0.0, network, f"{name}.lora_B")

    def _adapt_to(self, folder: PeftFolder, network: Network) -> None:
        """Adds the layers that a folder has, with their values."""
        self.rank, self.alpha, self.use_rslora, self.use_dora = folder.lora()
        for name, tensors in folder.layers(network, NAMES[: 2 + self.use_dora]).items():
            layer: Any = network.get_submodule(name)
            self._change(layer, tensors["lora_A"].shape[0])
            for leaf, tensor in tensors.items():
                folder.fill(getattr(layer, leaf), tensor, network, f"{name}.{leaf}")

    def _change(self, layer: nn.Linear, rank: int) -> LoRALinear:
        scaling = self.alpha / (math.sqrt(rank) if self.use_rslora else rank)
        changed: LoRALinear = change_layer(layer, LoRALinear)
        changed.add(rank, scaling, self.dropout, self.use_dora)
        return changed

    def merge(self, network: Network) -> bool:
        """Adds the updates to the weights; quantised ones become weights in float32."""
        for name, layer in list(network.named_modules()):
            if isinstance(layer, LoRALinear):
                weight = layer.merged()
                restore_layer(layer, NAMES)
                make_dense(network, name, weight)
        return True

    def peft_form(self, network: Network) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns what peft's files hold; see `toolkit.adapters.HasPeftForm`."""
        numbers = {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        kinds = {
            "peft_type": "LORA",
            "bias": "none",
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
        }
        config, keys = form(network, numbers | kinds, NAMES)
        ranks = {k: network.get_parameter(n).shape[0] for k, n in keys.items() if n.endswith("lora_A")}
        other = {layer_of(key): rank for key, rank in ranks.items() if rank != self.rank}
        return config | {"rank_pattern": other}, keys
