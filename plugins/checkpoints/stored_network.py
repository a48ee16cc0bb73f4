"""Builds networks from stored configurations, and the network of a checkpoint with its weights.

It imports the command line's checks of classes, which import the reading of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from core import catalog
from core.contracts import ChangesNetwork, Network
from core.errors import ConfigError
from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import RECORD, parse_config, read_checkpoint
from plugins.cli.configuration.class_check import ClassChecker
from plugins.cli.configuration.mistakes import main_reason
from plugins.cli.configuration.trust import trusting


def load_network(path: Path) -> tuple[Network, str, int | None]:
    """Rebuilds the network of a checkpoint, in eval mode on the CPU.

    Returns:
        The network, the JSON of its tokenizer (of the `tokenizers` library), and the end-of-text id.

    Raises:
        ConfigError: If the checkpoint holds no configuration or no tokenizer.
    """
    return network_in(read(path), path)


def read(path: Path) -> Mapping[str, Any]:
    """Returns what a checkpoint holds, a file or a folder, without the optimizers of a folder."""
    return sharded.read_sharded(path, optimizers=False) if sharded.is_sharded(path) else read_checkpoint(path)


def network_in(checkpoint: Mapping[str, Any], path: Path) -> tuple[Network, str, int | None]:
    """Returns what :func:`load_network` does, for a checkpoint that was read from a path."""
    config, tokenizer, end = described(checkpoint, path)
    network = build_network(config["model"]["network"])
    weights = weights_of(checkpoint)
    if network.state_dict().keys() != weights.keys():
        _change_as_trained(network, config["trainer"])
    network.load_state_dict(weights)
    return network.eval(), tokenizer, end


def described(checkpoint: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], str, int | None]:
    """Returns the configuration that a checkpoint holds, the JSON of its tokenizer, and the end-of-text id.

    Raises:
        ConfigError: If it holds no configuration or no tokenizer.
    """
    text = checkpoint.get(RECORD, {}).get("config")
    states = (value for value in checkpoint.values() if isinstance(value, Mapping))
    data = next((state for state in states if isinstance(state.get("tokenizer"), str)), None)
    if text is None:
        raise ConfigError(f"{path} was not written by `python -m core`: it lacks its config.")
    if data is None:
        raise ConfigError(
            f"{path} has no tokenizer, which texts need: it is of a run on tokens, or of weights that came without one."
        )
    return parse_config(text, path), data["tokenizer"], data.get("end_of_text_id")


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


def _change_as_trained(network: Network, trainer: Mapping[str, Any]) -> None:
    """Applies the run's techniques that change the network: quantised weights have other names."""
    for name in ("plugins", "callbacks"):
        for index, item in enumerate(trainer.get(name) or []):
            entry = catalog.by_class_path(item["class_path"])
            if entry is not None and issubclass(entry.load(), ChangesNetwork):
                build(entry.load(), item, ("trainer", name, index)).change_network(network)


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
            said = "\n".join(main_reason(str(error)).splitlines()[:5])
            raise ConfigError(f"{'.'.join(map(str, place))}: {said}") from error
