"""Activation offload: activations wait in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from toolkit.further_blocks import further_blocks

Packed = tuple[torch.device, Tensor] | Tensor


@technique(
    paper="ZeRO-Offload's idea for activations, arXiv:2101.06840; torch.autograd.graph.saved_tensors_hooks",
    after=("ActivationCheckpointing",),
    offers=("keeps_weights",),
)
class ActivationOffload(Callback):
    """Keeps the activations that the network's blocks save for backward in pinned host memory.

    Losses, gradients and weights are bitwise those of a run without it. Weights stay on the device. Together with
    `ActivationCheckpointing`, the kept inputs of the blocks are moved. On a CPU nothing is copied: the run is the
    same and needs as much memory.

    Args:
        min_bytes: Smaller tensors stay on the device: each copy costs some 10 microseconds.

    Raises:
        ConfigError: If `min_bytes` is negative, or the network has no blocks.

    Example:
        trainer:
          callbacks+:
            - class_path: ActivationOffload
              init_args: {min_bytes: 65536}
    """

    def __init__(self, min_bytes: int = 65536) -> None:
        if min_bytes < 0:
            raise ConfigError(f"ActivationOffload takes min_bytes >= 0, not {min_bytes}.")
        self.min_bytes = min_bytes

    def change_network(self, network: Network) -> None:
        """Wraps the blocks' `forward`: modules and their names stay."""
        if not network.blocks:
            raise ConfigError(f"ActivationOffload: {type(network).__name__} has no blocks.")
        for block in [*network.blocks, *further_blocks(network)]:
            offload_block(block, self.min_bytes)


def offload_block(block: nn.Module, min_bytes: int = 0) -> None:
    """Moves the saved tensors of a module that have at least this many bytes to the host until backward."""
    block.forward = partial(_forward, block.forward, min_bytes)  # type: ignore[method-assign]


def _forward(forward: Callable[..., Any], min_bytes: int, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    copies: dict[Any, tuple[Tensor, Packed]] = {}
    with saved_tensors_hooks(partial(_pack, min_bytes, copies), _unpack):
        result = forward(*args, **kwargs)
    copies.clear()
    return result


def _pack(min_bytes: int, copies: dict[Any, tuple[Tensor, Packed]], tensor: Tensor) -> Packed:
    # a view of a weight (its transpose, in a product) is the weight
    weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if weight or tensor.device.type == "cpu" or tensor.numel() * tensor.element_size() < min_bytes:
        return tensor
    # What several operators save (queries, keys and values have one input) is copied once. It is kept alive
    # until the block is done, so that no other tensor gets its address.
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    key = (*place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
    if key not in copies:
        pinned = tensor.device.type == "cuda" and torch.cuda.is_available()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        # Copies from and to pinned memory are queued in the device's stream; the host does not wait.
        copies[key] = tensor, (tensor.device, host.copy_(tensor, non_blocking=pinned))
    return copies[key][1]


def _unpack(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
