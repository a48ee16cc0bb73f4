"""Builds networks from stored configurations, and the network of a checkpoint with its weights.

It imports the command line's checks of classes, which import the reading of checkpoints.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser

from core import catalog
from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from plugins.checkpoints import sharded
from plugins.checkpoints.adapted import as_lazy, base_of, change, change_as_trained, merge
from plugins.checkpoints.checkpoint import RECORD, parse_config, read_checkpoint, stored_config
from plugins.checkpoints.finding import resolve
from plugins.checkpoints.matching import open_own
from plugins.checkpoints.remote_copies import shown
from plugins.cli.configuration.class_check import ClassChecker
from plugins.cli.configuration.mistakes import main_reason
from plugins.cli.configuration.trust import trusting
from plugins.precision.layers import is_quantised
from toolkit.adapters import Adapter
from toolkit.safetensors_files import LazyTensor


@technique(
    paper="a checkpoint that holds its network's configuration and tokenizer, see docs/interchange.md",
    offers=("stored_network",),
)
class StoredNetwork:
    """The network of a checkpoint of ours, for data parts that score text with it, such as PerplexityFilter.

    They find it through the catalogue. The checkpoint is found at once, and read when `load` is called.

    Args:
        path: A checkpoint, or a run folder (its newest checkpoint).

    Attributes:
        path: The checkpoint.

    Raises:
        ConfigError: If there is no complete checkpoint.

    Example:
        data:
          init_args:
            transforms:
              - class_path: PerplexityFilter            # reads the path by StoredNetwork
                init_args: {path: runs/base, max_perplexity: 1000}
    """

    def __init__(self, path: str) -> None:
        self.path = resolve(str(Path(path).expanduser()), Path())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its files, hexadecimal."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        found = hashlib.sha256()
        for file in files:
            if file.is_file():
                with file.open("rb") as stream:
                    found.update(hashlib.file_digest(stream, "sha256").digest())
        return found.hexdigest()

    def load(self) -> tuple[Network, str, int | None]:
        """Returns the network in eval mode on the CPU, the JSON of its tokenizer, and the end-of-text id.

        Raises:
            ConfigError: If the checkpoint holds no configuration or no tokenizer.
        """
        return load_network(self.path)


def load_network(path: Path) -> tuple[Network, str, int | None]:
    """Rebuilds the network of a checkpoint, in eval mode on the CPU.

    Returns:
        The network, the JSON of its tokenizer (of the `tokenizers` library), and the end-of-text id.

    Raises:
        ConfigError: If the checkpoint holds no configuration or no tokenizer.
    """
    return network_in(read(path), path)


def load_without_tokenizer(path: Path) -> Network:
    """Rebuilds the network of a checkpoint, which may have no tokenizer, in eval mode on the CPU.

    Raises:
        ConfigError: If the checkpoint holds no configuration.
    """
    checkpoint = read(path)
    return _network_of(checkpoint, _config_in(checkpoint, path))


def read(path: Path) -> Mapping[str, Any]:
    """Returns what a checkpoint holds, a file or a folder, without the optimizers of a folder."""
    return sharded.read_sharded(path, optimizers=False) if sharded.is_sharded(path) else read_checkpoint(path)


def network_in(
    checkpoint: Mapping[str, Any], path: Path, base_alone: bool = False
) -> tuple[Network, str, int | None]:
    """Returns what :func:`load_network` does, for a checkpoint that was read from a path.

    Args:
        checkpoint: What it holds.
        path: Where it was read.
        base_alone: Whether the base of an adapted network is returned, without its adapters.
    """
    config, tokenizer, end = described(checkpoint, path)
    if base_alone and is_adapted(config):
        return base_of(build_network(config["model"]["network"]), config, path).eval(), tokenizer, end
    return _network_of(checkpoint, config), tokenizer, end


def merged_network(path: Path) -> Network:
    """Returns the network of a checkpoint as its class builds it: adapters merged, quantised weights dequantised.

    It is on the CPU; where the meta device is the default one, there, with names and shapes alone.

    Raises:
        ConfigError: If its base is not there or another one, or weights cannot express one of the adapters.
    """
    checkpoint = read(path)
    with torch.device("meta" if torch.get_default_device().type == "meta" else "cpu"):
        network, adapters = _filled(checkpoint, stored_config(path))
        merge(network, adapters, path)
    return network


def adapted_on_meta(path: Path) -> tuple[Network, list[Adapter]]:
    """Returns the network of a checkpoint on the meta device with its adapters in it; the base is not read.

    Raises:
        ConfigError: If the checkpoint has no adapter.
    """
    config = stored_config(path)
    if not is_adapted(config):
        raise ConfigError(f"{shown(path)} holds no adapter: its run trained the whole network.")
    with torch.device("meta"):
        return _filled(read(path), config)


def with_adapters(base: Network, path: Path) -> Network:
    """Returns a network that shares the weights of a base, with the adapters of a checkpoint in it.

    Args:
        base: The network that the adapters were trained on; it stays as it is.
        path: The checkpoint.

    Raises:
        ConfigError: If the checkpoint has no adapter, was trained on another base, or holds all weights by itself.
    """
    config, checkpoint = stored_config(path), read(path)
    weights, named = weights_of(checkpoint), {**dict(base.named_parameters()), **dict(base.named_buffers())}
    if not is_adapted(config) or base.state_dict().keys() <= weights.keys():
        raise ConfigError(
            f"{shown(path)} holds a whole network, not an adapter beside its base: take it as --ckpt_path."
        )
    shared = {id(tensor): tensor for name, tensor in named.items() if name not in weights}
    network = copy.deepcopy(base, shared)
    change(network, config, checkpoint, build, True, ("callbacks",))
    network.load_state_dict(weights)
    return network.eval()


def own_tensors(path: Path) -> dict[str, LazyTensor]:
    """Returns the network's tensors in a checkpoint; of an adapted one those of the merged network.

    Raises:
        ConfigError: As :func:`merged_network`, or if the checkpoint is damaged.
    """
    return as_lazy(merged_network(path)) if is_adapted(stored_config(path)) else open_own(path)


def is_adapted(config: Mapping[str, Any]) -> bool:
    """Returns whether a run with a configuration has adapters."""
    items = (config.get("trainer") or {}).get("callbacks") or []
    entries = (catalog.by_class_path(item["class_path"]) for item in items)
    return any(entry is not None and entry.kind == "adapters" for entry in entries)


def _network_of(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> Network:
    network, adapters = _filled(checkpoint, config)
    if not any(is_quantised(layer) for layer in network.modules()):
        for adapter in reversed(adapters):
            adapter.merge(network)
    return network.eval()


def _filled(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Network, list[Adapter]]:
    network, weights = build_network(config["model"]["network"]), weights_of(checkpoint)
    if network.state_dict().keys() == weights.keys():
        network.load_state_dict(weights)
        return network, []
    return network, change_as_trained(network, config, checkpoint, weights, build)


def described(checkpoint: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], str, int | None]:
    """Returns the configuration that a checkpoint holds, the JSON of its tokenizer, and the end-of-text id.

    Raises:
        ConfigError: If it holds no configuration or no tokenizer.
    """
    config = _config_in(checkpoint, path)
    states = (value for value in checkpoint.values() if isinstance(value, Mapping))
    data = next((state for state in states if isinstance(state.get("tokenizer"), str)), None)
    if data is None:
        raise ConfigError(
            f"{shown(path)} has no tokenizer, which texts need: it is of a run on tokens, or of weights that came without "
            "one."
        )
    return config, data["tokenizer"], data.get("end_of_text_id")


def _config_in(checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    text = checkpoint.get(RECORD, {}).get("config")
    if text is None:
        raise ConfigError(f"{shown(path)} was not written by `python -m core`: it lacks its config.")
    return parse_config(text, path)


def weights_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the network's tensors in a checkpoint by their names in the network."""
    prefix = "network."
    return {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}


def build_network(config: Mapping[str, Any]) -> Any:
    """Builds a network from the `model.network` part of a saved configuration.

    Raises:
        ConfigError: If it names a class that is not a network, or an argument that the class does not take.
    """
    return build(Network, config, ("model", "network"))


def build(base: type, config: Mapping[str, Any], place: tuple[str | int, ...]) -> Any:
    """Builds a part of a saved configuration.

    Args:
        base: What it is: `Network`, `Objective`...
        config: Its `class_path` and `init_args`.
        place: Its keys in the configuration, for messages.

    Raises:
        ConfigError: If it names a class of another kind, or an argument that the class does not take.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{'.'.join(map(str, place))}: the stored configuration names no class.")
    with trusting():
        ClassChecker(lambda keys: ".".join(map(str, (*place, *keys)))).value(base, config, ())
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(base, "built")
        try:
            return parser.instantiate(parser.parse_object({"built": dict(config)})).built
        except ArgumentError as error:
            raise ConfigError(f"{'.'.join(map(str, place))}: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    """Returns what jsonargparse has against a part, in at most 9 lines; what stands below a class belongs to it."""
    said = main_reason(message)
    if said.endswith(":"):
        _, _, below = message.partition(said)
        own, _, _ = below.partition("\n    - ")  # the next of the types that it could have been
        said += "\n" + "\n".join(line.removeprefix("      ") for line in own.strip("\n").splitlines())
    return "\n".join(said.splitlines()[:9])
