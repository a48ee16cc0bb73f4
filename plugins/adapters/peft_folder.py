"""Folders of the peft library: adapter_config.json and adapter_model.safetensors, with names of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from core.contracts import Network
from core.errors import ConfigError, nearest
from toolkit.bounded import parse_json, read_error, read_inside
from toolkit.hugging_face import HasHuggingFaceForm, HuggingFaceForm, StoredTensor
from toolkit.initial_values import start_added
from toolkit.local_paths import is_url
from toolkit.safetensors_files import LazyTensor, read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "base_model.model."
PLAIN = {
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "alpha_pattern": {},
    "target_parameters": None,
}
"""Keys of the config -> the one value that can be read, if they are there."""


class PeftFolder:
    """A folder that peft wrote, its tensors not yet read.

    Args:
        path: The folder.

    Raises:
        ConfigError: If it is a URL, a file is missing or damaged, or says what layers here do not compute.
    """

    def __init__(self, path: str) -> None:
        if is_url(path):
            raise ConfigError(
                f"weights is {path}: adapters are read from folders of this machine. Download or mount it."
            )
        self.path = Path(path).expanduser()
        try:
            config = parse_json(read_inside(self.path, CONFIG), unique=False)
            if not isinstance(config, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path / CONFIG} cannot be read: {read_error(error)}.") from error
        self.config: dict[str, Any] = config
        for key, value in PLAIN.items():
            if config.get(key, value) not in (value, None):
                raise ConfigError(
                    f"{self.path / CONFIG}: {key} is {str(config[key])[:80]}; only {value} can be read."
                )
        self.tensors = read_safetensors(self.path, WEIGHTS)

    def lora(self) -> tuple[int, float, bool, bool]:
        """Returns rank, alpha, and whether it is rsLoRA and DoRA.

        Raises:
            ConfigError: If it is no LoRA, or a value has another type.
        """
        self.check_type("LORA")
        rank: Any = self.config.get("r")
        alpha: Any = self.config.get("lora_alpha")
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
            raise ConfigError(
                f"{self.path / CONFIG}: r is {str(rank)[:40]} and lora_alpha {str(alpha)[:40]}; both are above 0."
            )
        return rank, float(alpha), self.config.get("use_rslora") is True, self.config.get("use_dora") is True

    def check_type(self, expected: str) -> None:
        """Raises a ConfigError if the folder holds another kind of adapter."""
        if (found := self.config.get("peft_type")) != expected:
            raise ConfigError(
                f"{self.path / CONFIG}: peft_type is {str(found)[:40]}; here {expected} is read."
            )

    def layers(self, network: Network, leaves: Sequence[str]) -> dict[str, dict[str, LazyTensor]]:
        """Returns the tensors of each linear layer that has some, by the layer's name in the network.

        Args:
            network: The network.
            leaves: Names of a layer's parameters, all of which it has.

        Raises:
            ConfigError: If a tensor is left over or missing.
        """
        found: dict[str, dict[str, LazyTensor]] = {}
        left = dict(self.tensors)
        theirs = names_there(network)
        for name, there in theirs.items():
            own = {leaf: left.pop(key) for leaf in leaves if (key := key_of(there, leaf)) in left}
            if own:
                found[name] = own
                if missing := [leaf for leaf in leaves if leaf not in own]:
                    raise ConfigError(f"{self.path / WEIGHTS} has no {key_of(there, missing[0])}.")
        if left or not found:
            odd = ascii(next(iter(left), "no tensor"))[1:-1][:120]
            hint = nearest(odd, {key_of(there, leaf) for there in theirs.values() for leaf in leaves})
            raise ConfigError(
                f"{self.path / WEIGHTS} has {odd}, for which {type(network).__name__} has no place.{hint}"
            )
        return found

    def fill(self, parameter: Tensor, stored: LazyTensor, network: Network, name: str) -> None:
        """Copies a stored tensor into a parameter that was added to a network, once it is not on the meta device.

        Raises:
            ConfigError: If it has another shape.
        """
        if tuple(parameter.shape) != stored.shape:
            raise ConfigError(
                f"{self.path / WEIGHTS}: {name} is {stored.shape} there and {tuple(parameter.shape)} in the network: "
                "it was trained on another base."
            )
        start_added(parameter, stored, network, name)


def key_of(layer: str, leaf: str) -> str:
    """Returns the key of a parameter in peft's file, given its layer's name in transformers."""
    return f"{HEAD}{layer}.{leaf}" + (".weight" if leaf in ("lora_A", "lora_B") else "")


def layer_of(key: str) -> str:
    """Returns the layer's name in transformers for a key of peft's file."""
    return key.removeprefix(HEAD).removesuffix(".weight").rpartition(".")[0]


def names_there(network: Network) -> dict[str, str]:
    """Returns the names in transformers of the linear layers that are layers of their own there, too."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not isinstance(network, HasHuggingFaceForm):
        return {name: name for name in linear}
    weights = [name for name, _ in network.named_parameters() if name.endswith(".weight")]
    of_all = (one for one in network.hugging_face.forms() if _tensors(one, weights) is not None)
    if (found := next(of_all, None)) is None:
        return {}
    stored = {name: _tensors(found, [f"{name}.weight"]) for name in linear}
    return {
        name: one[0].theirs.removesuffix(".weight")
        for name, one in stored.items()
        if one and not one[0].transposed
    }


def _tensors(form: HuggingFaceForm, names: Sequence[str]) -> list[StoredTensor] | None:
    """Returns a form's tensors for some names; None: it has no place for one, or as a part of another alone."""
    try:
        return form.tensors(names)
    except ConfigError:
        return None


def form(
    network: Network, config: Mapping[str, Any], leaves: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what `toolkit.adapters.HasPeftForm` asks for.

    Args:
        network: With the adapter in it.
        config: What adapter_config.json says, beside the layers.
        leaves: Names of a layer's parameters.

    Raises:
        ConfigError: If a layer is a part of one in transformers.
    """
    there, keys = names_there(network), {}
    for name, _ in network.named_parameters():
        layer, _, leaf = name.rpartition(".")
        if leaf not in leaves:
            continue
        if layer not in there:
            raise ConfigError(
                f"--format peft: {layer} is a part of a layer in transformers, which peft changes as a whole. "
                "--format hf merges the adapter into the weights."
            )
        keys[key_of(there[layer], leaf)] = name
    layers = {there[name.rpartition(".")[0]]: None for name in keys.values()}
    return {**config, "target_modules": list(layers), "fan_in_fan_out": False}, keys
