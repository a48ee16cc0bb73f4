"""Frozen weights in 4 or 8 bits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from core.contracts import Network
from core.technique import Package, technique
from plugins.precision.layers import linear_layers, run_device

SHARDING = ("FSDP", "HybridParallel", "ModelParallelStrategy", "FSDPStrategy")
"""Strategies under which most ranks build the network on the meta device."""


@technique(
    paper="QLoRA, arXiv:2305.14314, section 3 (nf4, fp4); LLM.int8(), arXiv:2208.07339 (int8)",
    needs=[Package("bitsandbytes>=0.50")],
    conflicts=dict.fromkeys(
        SHARDING, "weights are quantised before they are sharded, which needs DDP or one device"
    ),
)
class BitsandbytesWeights(MixedPrecision):
    """Quantises and freezes the weights of linear layers in 4 or 8 bits; everything else trains in bf16-mixed.

    "nf4" and "fp4" take 4.1 bits per weight, "int8" 8. Gradients pass through the frozen layers. Their biases,
    embeddings, norms and the output head train. What is frozen is printed when the run starts. A checkpoint holds
    the quantised weights. On a CPU a product uses the dequantised weight; on a GPU "int8" also rounds activations
    to 8 bits.

    Args:
        kind: "nf4": 16 values at the quantiles of a normal distribution; "fp4": a 4-bit float; "int8": 255 levels
            scaled to the largest value of each row.
        layers: Names of linear layers, with `*` and `?`; None: all in the network's blocks.
        double_quantization: Whether the scales of 4-bit weights (one per 64 weights) are also quantised, to 8 bits.
        compute_dtype: Data type of products and activations.

    Raises:
        ConfigError: If an entry of `layers` matches no layer.

    Example:
        trainer:
          plugins+:
            - class_path: BitsandbytesWeights
              init_args: {kind: nf4}
    """

    def __init__(
        self,
        kind: Literal["nf4", "fp4", "int8"] = "nf4",
        layers: list[str] | None = None,
        double_quantization: bool = True,
        compute_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    ) -> None:
        super().__init__("bf16-mixed", "cpu")  # `connect` sets the run's device
        self.precision = "bf16-mixed" if compute_dtype == "bfloat16" else "32-true"  # type: ignore[assignment]
        self.kind, self.layers, self.double_quantization = kind, layers, double_quantization

    def change_network(self, network: Network) -> None:
        """Replaces linear layers by frozen, quantised ones."""
        from plugins.precision.frozen_linear import frozen

        chosen = linear_layers(network, self.layers, "BitsandbytesWeights")
        for name, layer in chosen.items():
            network.set_submodule(name, frozen(layer, self.kind, self.double_quantization))
        weights = sum(layer.weight.numel() for layer in chosen.values())
        self._frozen = f"{len(chosen)} linear layers are frozen in {self.kind} ({weights:,} weights)"

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Sets the run's device, and prints what is frozen."""
        self.device = run_device(model)
        if optimizers:
            self._print_frozen(sum(p.numel() for p in model.parameters() if p.requires_grad))
        return super().connect(model, optimizers, lr_schedulers)

    @rank_zero_only
    def _print_frozen(self, training: int) -> None:
        print(f"BitsandbytesWeights: {self._frozen}; {training:,} parameters train.", flush=True)

    def autocast_context_manager(self) -> torch.autocast:
        """Returns autocast to bfloat16, disabled if products are computed in float32."""
        on = self.precision == "bf16-mixed"
        return torch.autocast(self.device, torch.bfloat16, enabled=on, cache_enabled=False)
