"""Puts together the network of a checkpoint that holds an adapter: the base that it leaves out, and what was trained."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from core import catalog
from core.contracts import ChangesNetwork, Network
from core.errors import ConfigError
from toolkit.adapters import Adapter
from toolkit.safetensors_files import LazyTensor


def change_as_trained(
    network: Network,
    config: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Any],
    build: Any,
) -> list[Adapter]:
    """Changes a network that was just built as the run that wrote a checkpoint did, and fills it.

    Args:
        network: The network.
        config: That of the run.
        checkpoint: What the checkpoint holds.
        weights: The network's tensors in it.
        build: Called with a base class, the configuration of a technique and its place; builds it.

    Returns:
        The run's adapters.

    Raises:
        ConfigError: If the base is not there, or is another one.
    """
    base = config["model"].get("weights")
    leaves_out = network.state_dict().keys() - weights.keys()
    if leaves_out and base:
        _read_base(network, base)
    kept = bool(leaves_out and base)
    adapters = change(network, config, checkpoint, build, kept)
    if not is_on_meta(network):
        network.load_state_dict(weights)
    for adapter in adapters:  # from here on the base is here
        adapter.base_is_elsewhere = False
    return adapters


def base_of(network: Network, config: Mapping[str, Any], path: Path) -> Network:
    """Fills a network that was just built with the base that a run with adapters started from.

    Raises:
        ConfigError: If the run had none: its checkpoints hold all weights.
    """
    if not (base := config["model"].get("weights")):
        raise ConfigError(f"{path} has no base that adapters share: its run had no model.weights.")
    _read_base(network, base)
    return network


def _read_base(network: Network, base: str) -> None:
    if not (place := Path(base).expanduser()).exists():
        where = (
            ""
            if place.is_absolute()
            else f", seen from {Path.cwd()}: call the command where the run was started"
        )
        raise ConfigError(
            f"The checkpoint holds an adapter, and the base that it was trained on is not in {base}{where}.\n"
            f"Put the base there again, or a link to it: ln -s NEW_PLACE {shlex.quote(base)}\nOr train on with "
            "`fit --ckpt_path RUN --model.weights=NEW_PLACE`: checkpoints that are written then name the new place."
        )
    # By the catalogue, as a run does: the file reads adapted checkpoints with the help of this one.
    catalog.offering("initial_weights", "data").load()(base).change_network(network)


def change(
    network: Network,
    config: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
    build: Any,
    base_is_elsewhere: bool,
    sections: tuple[str, ...] = ("plugins", "callbacks"),
) -> list[Adapter]:
    """Applies the precision and the callbacks of a run that change the network; returns its adapters.

    Raises:
        ConfigError: If they were trained on another base.
    """
    adapters = []
    for section in sections:
        for index, item in enumerate(config["trainer"].get(section) or []):
            entry = catalog.by_class_path(item["class_path"])
            if entry is None or not issubclass(entry.load(), ChangesNetwork):
                continue
            part = build(entry.load(), item, ("trainer", section, index))
            if isinstance(part, Adapter):
                part.base_is_elsewhere = base_is_elsewhere
                adapters.append(part)
            part.change_network(network)
            if isinstance(part, Adapter):
                part.check_base(checkpoint)
    return adapters


def merge(network: Network, adapters: list[Adapter], path: Path) -> None:
    """Moves what adapters trained into the weights of a network, and dequantises it: it is as its class builds it.

    Raises:
        ConfigError: If weights cannot express one of the adapters.
    """
    from plugins.precision.layers import is_quantised, make_dense, weight_of

    for adapter in reversed(adapters):
        if not adapter.merge(network):
            raise ConfigError(
                f"{path}: what {type(adapter).__name__} trained cannot be merged into the weights of the network. "
                "`generate`, `chat` and `serve` take the checkpoint as it is."
            )
    for name, layer in list(network.named_modules()):
        if is_quantised(layer):
            make_dense(network, name, weight_of(layer))


def is_on_meta(network: Network) -> bool:
    """Returns whether a network has names and shapes, but no weights."""
    return any(parameter.is_meta for parameter in network.parameters())


def as_lazy(network: Network) -> dict[str, LazyTensor]:
    """Returns the tensors of a network as those of a file."""
    return {
        name: LazyTensor(tuple(value.shape), value.dtype, partial(value.detach))
        for name, value in network.state_dict().items()
    }
