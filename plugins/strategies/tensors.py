"""Whole tensors and their parts on a mesh of ranks: sent from rank 0, gathered there, cut out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from core.checkpoints.checkpoint import EXTRA_STATE
from core.checkpoints.sharded import Stored
from core.errors import ConfigError
from core.training.shards import reshard


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the values of each parameter and buffer, in the same memory, once, by its first name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


@contextmanager
def _tied() -> Iterator[None]:
    # Swapped, a parameter stays the same object: what is tied stays tied.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def to_meta(module: nn.Module) -> None:
    """Gives up the memory of a module's tensors, unless somebody else holds them."""
    with _tied():
        nn.Module.to(module, "meta")  # Lightning's own notes the device as the module's


def to_memory(module: nn.Module, device: torch.device) -> None:
    """Gives a module on the meta device memory for the parts of its tensors that it holds."""
    with _tied():
        module.to_empty(device=device)


@torch.no_grad()
def spread(whole: Mapping[str, Tensor], module: nn.Module, device: torch.device) -> None:
    """Fills a module's tensors with rank 0's, sending one at a time; called on every rank.

    Args:
        whole: All tensors of the whole module in the same order on each rank: on rank 0 with their values.
        module: Holds any of them, or parts.
        device: Of the messages.
    """
    own, main = named_tensors(module), dist.get_rank() == 0
    for name, tensor in whole.items():
        message = tensor.to(device) if main else torch.empty_like(tensor, device=device)
        dist.broadcast(message, 0)
        if name in own:
            fill(own[name], message)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that is on this rank, in the same memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of a whole tensor."""
    local(target).copy_(part(whole, target))


def part(whole: Tensor, like: Tensor) -> Tensor:
    """Returns the part of a whole tensor that this rank holds of a tensor of the same shape."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, start if size else 0, size)
    return whole


def parts(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Returns the parts of a parameter's whole optimizer state that lie where the parameter does.

    What is stored in a folder gets room that is not filled.
    """
    return {name: _placed(value, parameter) for name, value in state.items()}


def _placed(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Stored):
        if value.shape == parameter.shape and len(value.shape) > 0:
            return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        return torch.empty(value.shape, dtype=value.dtype)
    fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
    if not (fits and isinstance(parameter, DTensor)):
        return value
    own = part(value, parameter).to(local(parameter).device, copy=True)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=value.shape, stride=value.stride()
    )


def refuse_extra_state(module: nn.Module, strategy: str) -> None:
    """Raises a ConfigError if a module saves more than parameters and buffers: nothing says which rank holds what of it."""
    for name, value in module.state_dict().items():
        if name.endswith(EXTRA_STATE) and not (isinstance(value, Tensor) and value.numel() == 0):
            raise ConfigError(
                f"{strategy} saves parameters and buffers, and {name.removesuffix(EXTRA_STATE).rstrip('.')} saves more "
                "(its get_extra_state).\nTake --trainer.strategy=DDP, or keep it in a buffer."
            )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that checkpoints hold, sharded ones as such."""
    reshard(module)
    return module.state_dict(keep_vars=True)


@torch.no_grad()
def gather(values: Any, keep: bool) -> Any:
    """Returns nested values with whole tensors on the CPU where `keep`, and empty mappings elsewhere.

    Called on every rank with the same structure. A tensor that occurs twice does so in the result.
    """
    seen: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            found = {key: whole(item) for key, item in value.items()}
            return found if keep else {}
        if isinstance(value, list | tuple):
            return type(value)(map(whole, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in seen:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            seen[id(value)] = full.detach().to("cpu", copy=True) if keep else full.detach().new_empty(0)
        return seen[id(value)]

    return whole(values)
