"""Learned factors for keys, values and the inner activations of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from plugins.adapters.peft_folder import PeftFolder, form, layer_of
from plugins.precision.layers import linear_layers, make_dense, weight_of, wide_type
from toolkit.adapters import Adapter, change_layer, restore_layer
from toolkit.initial_values import start_added

NAMES = ("ia3_l",)


class IA3Linear(nn.Linear):
    """A linear layer whose inputs or outputs are multiplied by learned factors.

    Attributes:
        ia3_l: (1, in), factors of the inputs, or (out, 1), of the outputs; in at least float32.
        on_inputs: Which of the two.
    """

    ia3_l: Tensor
    on_inputs: bool

    def add(self, on_inputs: bool) -> None:
        """Adds the factors: 1 at first."""
        self.on_inputs = on_inputs
        shape = (1, self.in_features) if on_inputs else (self.out_features, 1)
        self.ia3_l = nn.Parameter(torch.ones(shape, dtype=wide_type(self), device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., in) to (..., out)."""
        factors = self.ia3_l.flatten()
        if self.on_inputs:
            return super().forward((x * factors).to(x.dtype))
        y = super().forward(x)
        return (y * factors).to(y.dtype)


@technique(paper="T-Few, arXiv:2205.05638, section 3.3: 0.01% of the parameters", offers=("keeps_weights",))
class IA3(Adapter):
    """Multiplies keys, values and the inner activations of each MLP by learned factors, which start at 1.

    The factors of the MLP are those of the inputs of its last layer. Biases are multiplied, too.

    Args:
        layers: Patterns for names of linear layers whose outputs are multiplied; None: "*.k_proj" and "*.v_proj".
        input_layers: Patterns for those whose inputs are; None: "*.down_proj".
        weights: A folder that peft or `export --format peft` wrote, to start from; its layers hold.

    Raises:
        ConfigError: If a pattern matches no layer, or `weights` do not fit the network.

    Example:
        trainer:
          callbacks+:
            - class_path: IA3
    """

    def __init__(
        self,
        layers: list[str] | None = None,
        input_layers: list[str] | None = None,
        weights: str | None = None,
    ) -> None:
        self.layers = ["*.k_proj", "*.v_proj"] if layers is None else layers
        self.input_layers = ["*.down_proj"] if input_layers is None else input_layers
        self.weights = weights

    def adapt(self, network: Network) -> None:
        """Adds the factors."""
        if self.weights is not None:
            folder = PeftFolder(self.weights)
            folder.check_type("IA3")
            for name, tensors in folder.layers(network, NAMES).items():
                layer: Any = network.get_submodule(name)
                change_layer(layer, IA3Linear).add(on_inputs=tensors["ia3_l"].shape[0] == 1)
                folder.fill(layer.ia3_l, tensors["ia3_l"], network, f"{name}.ia3_l")
            return
        outputs = linear_layers(network, self.layers, "IA3")
        inputs = linear_layers(network, self.input_layers, "IA3")
        if both := sorted(outputs.keys() & inputs.keys()):
            raise ConfigError(
                f"IA3: {both[0]} is in layers and in input_layers. Leave it out of one of them."
            )
        changed: Any
        for name, changed in {**outputs, **inputs}.items():
            change_layer(changed, IA3Linear).add(on_inputs=name in inputs)
            start_added(changed.ia3_l, 1.0, network, f"{name}.ia3_l")

    @torch.no_grad()
    def merge(self, network: Network) -> bool:
        """Multiplies the weights, and biases, by the factors; quantised weights become weights in float32."""
        for name, layer in list(network.named_modules()):
            if isinstance(layer, IA3Linear):
                weight = weight_of(layer) * layer.ia3_l
                if not layer.on_inputs and layer.bias is not None:
                    layer.bias.mul_(layer.ia3_l.flatten())
                restore_layer(layer, NAMES)
                make_dense(network, name, weight)
        return True

    def peft_form(self, network: Network) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns what peft's files hold; see `toolkit.adapters.HasPeftForm`."""
        config, keys = form(network, {"peft_type": "IA3"}, NAMES)
        inputs = [layer_of(key) for key, name in keys.items() if network.get_parameter(name).shape[0] == 1]
        return config | {"feedforward_modules": inputs}, keys
