"""Full tensors and their shards on a mesh of ranks: local shards, gathered on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from core.errors import ConfigError
from core.training.shards import reshard
from core.training.weights import EXTRA_STATE


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns each parameter and buffer, detached, once, under its first name; shares memory."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


@contextmanager
def _tied() -> Iterator[None]:
    # With swapping, a parameter stays the same object: tied parameters stay tied.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def to_meta(module: nn.Module) -> None:
    """Moves a module to the meta device, which frees its memory unless other references hold it."""
    with _tied():
        nn.Module.to(module, "meta")  # not the method of Lightning, which records the device


def to_memory(module: nn.Module, device: torch.device) -> None:
    """Allocates memory for the shards of a module on the meta device."""
    with _tied():
        module.to_empty(device=device)


def replace(module: nn.Module, value: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of a module on the meta device; parameters stay the same objects."""
    for parameter in module.parameters():
        new = nn.Parameter(value(parameter), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, new)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, value(buffer))


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor; shares memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it would be a view that autograd records
        return tensor.to_local()


@torch.no_grad()
def copy_part(target: Tensor, full: Tensor) -> None:
    """Copies this rank's shard of a full tensor into `target`."""
    local_shard(target).copy_(part(full, target))


def part(full: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a full tensor, sharded as `like`, of the same shape."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, start if size else 0, size)
    return full


def is_stored(value: Any) -> bool:
    """Returns whether a value of a checkpoint is a tensor that has not been read; see `core.contracts.ReadsParts`."""
    return hasattr(value, "dtype") and not isinstance(value, Tensor)


def parts(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Returns this rank's shards of a parameter's full optimizer state, sharded as the parameter.

    For tensors of a sharded checkpoint memory is allocated and not filled.
    """
    return {name: _placed(value, parameter) for name, value in state.items()}


def _placed(value: Any, parameter: Tensor) -> Any:
    if is_stored(value):
        if value.shape == parameter.shape and len(value.shape) > 0:
            return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        return torch.empty(value.shape, dtype=value.dtype)
    fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
    if not (fits and isinstance(parameter, DTensor)):
        return value
    own = part(value, parameter).to(local_shard(parameter).device, copy=True)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=value.shape, stride=value.stride()
    )


def refuse_extra_state(module: nn.Module, strategy: str) -> None:
    """Raises a ConfigError if a module has extra state: it is unknown which rank holds which part of it."""
    for name, value in module.state_dict().items():
        if name.endswith(EXTRA_STATE) and not (isinstance(value, Tensor) and value.numel() == 0):
            raise ConfigError(
                f"{strategy} saves parameters and buffers, and {name.removesuffix(EXTRA_STATE).rstrip('.')} saves more "
                "(its get_extra_state).\nTake --trainer.strategy=DDP, or keep it in a buffer."
            )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that checkpoints hold, sharded ones as DTensors."""
    reshard(module)
    return module.state_dict(keep_vars=True)


@torch.no_grad()
def gather(values: Any, keep: bool) -> Any:
    """Returns nested values with full tensors on the CPU if `keep`, else empty mappings.

    Called on every rank with the same structure. A tensor that occurs twice occurs twice in the result.
    """
    seen: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, Mapping):
            found = {key: gathered(item) for key, item in value.items()}
            return found if keep else {}
        if isinstance(value, list | tuple):
            return type(value)(map(gathered, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in seen:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            seen[id(value)] = full.detach().to("cpu", copy=True) if keep else full.detach().new_empty(0)
        return seen[id(value)]

    return gathered(values)
