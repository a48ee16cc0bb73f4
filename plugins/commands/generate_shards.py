"""Loads this rank's part of a checkpoint's network: tensor parallelism for generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from core.contracts import Network
from core.errors import ConfigError
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.sharded import load_tensors
from plugins.checkpoints.stored_network import (
    build_network,
    described,
    is_adapted,
    merged_network,
    weights_of,
)
from plugins.strategies import tensor_parallel, tensors


def read_shards(path: Path) -> Mapping[str, Any]:
    """Returns what a checkpoint holds: of a folder's tensors only where they are, and those of a file mapped into memory."""
    return AtomicCheckpoint().read_parts(path) or read_checkpoint(path)


def shard_network(
    checkpoint: Mapping[str, Any], path: Path, device: torch.device, dtype: torch.dtype | None
) -> tuple[Network, str, int | None]:
    """Returns what `network_in` does, with the network sharded over all ranks; called on every rank.

    It is built on the meta device. A rank reads its parts of the weights, and no others; of an adapted network all, to merge
    them.

    Args:
        checkpoint: What :func:`read_shards` returned.
        path: Where it was read.
        device: Of this rank.
        dtype: Of the weights; None: as the network has them.

    Raises:
        ConfigError: As `load_network`, or if the network cannot be sharded over so many ranks.
    """
    config, tokenizer, end = described(checkpoint, path)
    with torch.device("meta"):
        network = build_network(config["model"]["network"])
    weights = merged_network(path).state_dict() if is_adapted(config) else weights_of(checkpoint)
    _check(network, weights, path)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    tables = _tables(network)
    _shard(network, device)
    tensors.to_memory(network, device)
    with torch.no_grad():
        for name, table in tables.items():
            network.get_buffer(name).copy_(table)
    _fill(network, weights)
    return network.eval(), tokenizer, end


def _check(network: Network, weights: Mapping[str, Any], path: Path) -> None:
    own, ranks = network.state_dict(), dist.get_world_size()
    if other := sorted(own.keys() ^ weights.keys()):
        raise ConfigError(
            f"{path} has other weights than its network: {other[0]}. Quantised ones are not sharded: leave "
            "--tensor_parallel away."
        )
    for name, value in own.items():
        if value.shape != weights[name].shape:
            raise ValueError(f"size mismatch for {name}: {weights[name].shape} there, {value.shape} here")
    if fault := next(tensor_parallel.compatibility_errors(network, ranks, False, False), None):
        raise ConfigError(f"--tensor_parallel {ranks}: {fault}.")


def _tables(network: Network) -> dict[str, Tensor]:
    """Returns buffers that no checkpoint has, such as tables of positions, as `init_weights` fills them.

    Parameters are on the meta device, where their initialisation does nothing.
    """
    for module in network.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    network.init_weights()
    stored = network.state_dict().keys()
    return {name: buffer.clone() for name, buffer in network.named_buffers() if name not in stored}


def _shard(network: Network, device: torch.device) -> None:
    """Shards matrices by the network's plan, and the head and tied embeddings along the vocabulary where that divides."""
    ranks = dist.get_world_size()
    vocabulary = not any(tensor_parallel.compatibility_errors(network, ranks, False, True))
    mesh = init_device_mesh(device.type, (ranks,))
    tensor_parallel.apply(network, mesh, sequence=False, vocabulary=vocabulary)
    if vocabulary:
        logits: Any = network.logits
        network.logits = lambda hidden: logits(hidden).full_tensor()  # type: ignore[method-assign]


def _fill(network: Network, weights: Mapping[str, Any]) -> None:
    pairs: list[tuple[Any, Tensor]] = []
    for name, target in network.state_dict().items():
        if tensors.is_stored(weights[name]):
            pairs.append((weights[name], target))
        else:
            tensors.copy_part(target, weights[name])
    load_tensors(pairs)
