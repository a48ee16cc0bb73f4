"""Frozen networks of objectives, such as a teacher, whose weights are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from core.contracts import Network
from plugins.strategies import initial_shards, tensors
from plugins.strategies.mixed_precision import Formats
from toolkit.frozen_networks import FrozenNetwork, KeepsFrozenNetwork


class FrozenShards:
    """Shards a frozen network: each block is gathered for its forward and freed after it, the rest after the step's backward.

    The shards are kept in the data type in which they are gathered: nothing else needs their values.

    Args:
        frozen: On the meta device; it is sharded in place, and each rank reads its shards.
        formats: Of the network that is trained.
        device: On which it computes.
        options: Of `fully_shard`, such as the mesh.
    """

    def __init__(
        self, frozen: FrozenNetwork, formats: Formats, device: torch.device, options: Mapping[str, Any]
    ) -> None:
        network = frozen.network
        for parameter in network.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(formats.params or parameter.dtype)
        for block in network.blocks:
            formats.set_up(block)
            fully_shard(block, mp_policy=formats.policy(block), **options)
        policy = formats.policy(network)
        self.network: Any = fully_shard(network, reshard_after_forward=False, mp_policy=policy, **options)
        # before FSDP's own hook, which gathers, and may run out of memory
        network.register_forward_pre_hook(self._note, prepend=True)
        offloaded = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
        tensors.to_memory(network, torch.device("cpu") if offloaded else device)
        for name, tensor in tensors.named_tensors(network).items():
            initial_shards.draw_shard(tensor, frozen.starts[name], 0, name)
        for buffer in network.buffers():
            buffer.data = buffer.to(device)
        self._ran = False

    def _note(self, *_: Any) -> None:
        self.release()  # after a backward of which the strategy was not told, as in trials of a batch size
        self._ran = True

    def release(self) -> None:
        """Frees what is gathered, as a backward of the network would; called when that of the step is over."""
        if not self._ran:
            return
        self._ran = False
        if hasattr(
            FSDPModule, "reset_iter_state"
        ):  # from torch 2.14 on; it also forgets the order of the blocks
            self.network.reset_iter_state()
        else:
            self.network.reshard()


def kept_blocks(objective: nn.Module) -> list[nn.Module]:
    """Returns the blocks of networks that are submodules of an objective, such as a reference that checkpoints keep."""
    kept = [part for part in objective.modules() if isinstance(part, Network)]
    return [block for network in kept for block in network.blocks]


def shard_frozen(
    module: Any, precision: Precision, formats: Formats, device: torch.device, options: Mapping[str, Any]
) -> list[FrozenShards]:
    """Shards the frozen networks of a module's objectives; none of them without options. See :class:`FrozenShards`."""
    keeping = [part for part in module.objective.modules() if isinstance(part, KeepsFrozenNetwork)]
    found = []
    for part in keeping if options else ():
        with precision.tensor_init_context():
            frozen = part.frozen_network(module.network)
        found.append(FrozenShards(frozen, formats, device, options))
    return found
