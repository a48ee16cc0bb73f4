"""Matrix products of linear layers in fp8, by NVIDIA's Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from core.contracts import Network
from core.technique import Device, Package, technique
from plugins.precision.layers import linear_layers


@technique(
    paper="FP8 Formats for Deep Learning, arXiv:2209.05433; Transformer Engine's Float8CurrentScaling",
    needs=[
        Package("transformer-engine[pytorch]>=2.2", extra="transformer-engine"),
        Device("cuda", capability=(8, 9)),
    ],
    offers=("keeps_weights",),
)
class TransformerEngine(MixedPrecision):
    """Computes linear layers in fp8 with Transformer Engine's kernels; everything else is bf16-mixed.

    Each tensor has one scale, computed from its current values, so that no history has to be saved. Weights stay in
    float32 under their names. `Float8` does the same with torchao and also runs without a GPU.

    Args:
        fp8_format: "HYBRID": e4m3 in forward, e5m2 for gradients; "E4M3": e4m3 for both.
        layers: Names of linear layers, with `*` and `?`; None: all in the network's blocks.

    Raises:
        ConfigError: If an entry of `layers` matches no layer.

    Example:
        trainer:
          accelerator: cuda
          plugins+:
            - class_path: TransformerEngine
              init_args: {fp8_format: HYBRID}
    """

    def __init__(
        self, fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID", layers: list[str] | None = None
    ) -> None:
        super().__init__("bf16-mixed", "cuda")
        self.fp8_format, self.layers = fp8_format, layers

    def change_network(self, network: Network) -> None:
        """Replaces linear layers by Transformer Engine's, with the same parameters."""
        for name, layer in linear_layers(network, self.layers, "TransformerEngine").items():
            network.set_submodule(name, _converted(layer))

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Computes in bf16, and in fp8 in layers that support it."""
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling, Format

        recipe = Float8CurrentScaling(fp8_format=getattr(Format, self.fp8_format))
        with self.autocast_context_manager(), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            yield


def _converted(layer: nn.Linear) -> Any:
    import transformer_engine.pytorch as te

    class Linear(te.Linear):
        # Its extra state is a pickle, which the safe loader refuses; without a scaling history it is empty anyway.
        def get_extra_state(self) -> torch.Tensor:
            return torch.empty(0)

        def set_extra_state(self, state: Any) -> None:
            pass

    changed = Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device=layer.weight.device,
    )
    changed.weight = layer.weight
    if layer.bias is not None:
        changed.bias = layer.bias
    return changed
