"""Matrix products of linear layers in fp8, by torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import Network
from core.errors import ConfigError
from core.technique import Package, technique
from plugins.precision.layers import linear_layers, run_device

if TYPE_CHECKING:
    from toolkit.selection import Run, Selected

CAPABILITY = (8, 9)
"""The lowest compute capability with fp8 products: Ada and Hopper."""


@technique(
    paper="FP8 Formats for Deep Learning, arXiv:2209.05433; recipes of torchao.float8",
    needs=[Package("torchao>=0.18", extra="torchao")],
    offers=("keeps_weights",),
)
class Float8(MixedPrecision):
    """Computes linear layers in fp8 with dynamic scaling; everything else is bf16-mixed.

    Weights stay in float32 under their names, so that checkpoints work with any other precision. The output head
    stays in bf16 unless `layers` names it. Without a GPU of compute capability 8.9 fp8 is emulated: with the same
    rounding, but slower than bf16. On a GPU a gain needs `Compile`, and wide layers: on an H100 a step took 0.85 of that in
    bf16 at the width of Llama 8B (4,096), 0.96 at GPT-2 1.5B (1,600), 1.15 at GPT-2 124M (768).

    Args:
        recipe: What shares a scale. "tensorwise": a whole tensor (fastest). "rowwise": a row or column, with scales
            that are powers of two (more exact). "rowwise_with_gw_hp": also weight gradients in bf16 (most exact).
        layers: Names of linear layers, with `*` and `?`; None: all in the network's blocks.
        emulate: Whether to round to fp8 and multiply in bf16; None: if the hardware has no fp8.

    Raises:
        ConfigError: If an entry of `layers` matches no layer; without emulation, if a size is not a multiple of 16.

    Example:
        trainer:
          plugins+:
            - class_path: Float8
              init_args: {recipe: rowwise}
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        layers: list[str] | None = None,
        emulate: bool | None = None,
    ) -> None:
        super().__init__("bf16-mixed", "cpu")  # `connect` sets the run's device
        self.recipe, self.layers, self.emulate = recipe, layers, emulate

    @classmethod
    def preflight(cls, run: Run, own: Selected) -> Iterator[str]:
        """Yields an error if `emulate` is false and the GPU has no fp8."""
        if own.arguments.get("emulate") is False and run.accelerator == "cuda" and not _has_fp8():
            least = "{}.{}".format(*CAPABILITY)
            yield f"emulate is false, and a GPU without compute capability {least} has no fp8: leave emulate out"

    def change_network(self, network: Network) -> None:
        """Replaces linear layers by fp8 layers with the same parameters."""
        from torchao.float8 import Float8LinearConfig

        chosen = linear_layers(network, self.layers, "Float8")
        on_cpu = next(network.parameters()).device.type == "cpu"
        emulate = (on_cpu or not _has_fp8()) if self.emulate is None else self.emulate
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=emulate)
        for name, layer in chosen.items():
            if not emulate:
                _check_sizes(name, layer)
            network.set_submodule(name, _layer_class().from_float(layer, config=config))

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Sets the run's device."""
        self.device = run_device(model)
        return super().connect(model, optimizers, lr_schedulers)


def _has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY


def _check_sizes(name: str, layer: nn.Linear) -> None:
    if layer.in_features % 16 or layer.out_features % 16:
        raise ConfigError(
            f"Float8: {name} is {layer.out_features} x {layer.in_features}, and fp8 products need multiples of 16.\n"
            "Change the network's width, choose others with `layers`, or set emulate to true."
        )


@cache
def _layer_class() -> Any:
    from torchao.float8.float8_linear import Float8Linear

    class AutocastFloat8Linear(Float8Linear):
        """Computes in fp8 under autocast, and as a plain linear layer otherwise: sampling is in float32."""

        def forward(self, input: Tensor) -> Tensor:
            device = input.device.type
            if not torch.is_autocast_enabled(device):
                return F.linear(input, self.weight, self.bias)
            # torchao checks autocast on GPUs only: on a CPU gradients would not have the dtype of the input
            input = input.to(torch.get_autocast_dtype(device))
            # compiled code is for gradients, and the compiler breaks off at the question
            if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
                return super().forward(input)
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # torchao's tensors do not support inference mode
                return super().forward(input)

    return AutocastFloat8Linear
