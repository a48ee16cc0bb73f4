"""What DeepSpeed has cut into flat parts: put together for a checkpoint, and taken apart again.

DeepSpeed's own checkpoints are pickles for one stage and one number of ranks: none is written or read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoints import sharded


def is_cut(parameter: Any) -> bool:
    """Returns whether a parameter lies on the ranks in parts (stage 3)."""
    return hasattr(parameter, "ds_id")


def tell_whole_shapes(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts tensors without memory, of the whole shapes, for what is cut: a hook of `state_dict`."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_cut(parameter) and not isinstance(state.get(prefix + name), nn.Parameter):
            shape: Any = parameter.ds_shape
            state[prefix + name] = torch.empty(shape, dtype=parameter.dtype, device="meta")


# -- weights -----------------------------------------------------------------------------------------


@torch.no_grad()
def whole_weight(tensor: Tensor, zero: Any) -> Tensor:
    """Returns a whole parameter as the optimizer has it, in float32, or a buffer; called on every rank.

    Args:
        tensor: Parameter or buffer.
        zero: DeepSpeed's optimizer; None where nothing is trained.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if zero is not None and tensor.requires_grad:
        full: Tensor = safe_get_full_fp32_param(tensor) if _shared(tensor, zero) else _own(tensor, zero)
        return full
    if not is_cut(tensor):
        return tensor.detach()
    with GatheredParameters([tensor]):
        return tensor.detach().clone()


def _shared(parameter: Tensor, zero: Any) -> bool:
    return not is_cut(parameter) or zero.swap_optimizer or dist.get_world_size() > 1


def _own(parameter: Any, zero: Any, name: str | None = None) -> Tensor:
    """Returns what one rank has whole in stage 3, where it lies: on the host there is no room for two of it."""
    part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True, optim_state_key=name)
    whole: Tensor = part[: parameter.ds_numel].view(parameter.ds_shape)
    return whole


@torch.no_grad()
def put_weight(tensor: Tensor, value: Tensor, zero: Any) -> None:
    """Fills a parameter or buffer from a whole one; called on every rank, and then `spread_weights`."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if zero is None or not tensor.requires_grad:
        with GatheredParameters([tensor] if is_cut(tensor) else [], modifier_rank=0):
            if not is_cut(tensor) or dist.get_rank() == 0:
                tensor.copy_(value)
    elif is_cut(tensor):
        safe_set_local_fp32_param(tensor, _own_part(value, tensor))
    else:
        safe_set_full_fp32_param(tensor, value)


@torch.no_grad()
def spread_weights(zero: Any, stage: int) -> None:
    """Gives the network the weights that were put into the optimizer's parts."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for number in range(len(zero.fp16_groups)):
        with _at_hand(zero, number):
            zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:  # they are whole on every rank between steps, too
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


@contextmanager
def _at_hand(zero: Any, number: int) -> Iterator[None]:
    """Fetches from NVMe what is stepped as one flat part, if it is there, and brings it back."""
    swapped = getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(number)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(number)
    yield
    if swapped:
        zero._optimizer_states_and_gradient_swap_out(number)


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's part of a flattened tensor; zeros fill up the last rank's."""
    size = parameter.ds_tensor.numel()
    own = value.flatten()[dist.get_rank() * size :][:size]
    return nn.functional.pad(own, (0, size - own.numel()))


# -- states of the optimizer -------------------------------------------------------------------------


def _parts(zero: Any, stage: int) -> list[tuple[dict[str, Any], Tensor, list[Any]]]:
    """Returns each flat tensor that is stepped, behind its group, before the parameters that it has parts of."""
    groups = zero.optimizer.param_groups
    if stage < 3:
        return list(zip(groups, zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))
    owners = [groups[zero.sub_group_to_group_id[number]] for number in range(len(zero.fp16_groups))]
    return list(zip(owners, zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))


@torch.no_grad()
def whole_states(
    zero: Any, stage: int, numbers: Mapping[int, int], keep: Callable[[Any], bool]
) -> dict[int, dict[str, Any]]:
    """Returns the optimizer's states of whole parameters, on the CPU; called on every rank.

    Args:
        zero: DeepSpeed's optimizer.
        stage: 1, 2 or 3.
        numbers: id of a parameter -> its number in the optimizer of one process.
        keep: Whether this rank is to have the states of a parameter.
    """
    states: dict[int, dict[str, Any]] = {}
    _link(zero, stage)
    for _, flat, parameters in _parts(zero, stage):
        own = zero.optimizer.state.get(flat, {})
        for parameter in parameters if own else ():
            found = {name: _whole_state(parameter, zero, name, value) for name, value in own.items()}
            if keep(parameter):
                on_host = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in found.items()}
                states[numbers[id(parameter)]] = on_host
    return dict(sorted(states.items()))


def _whole_state(parameter: Tensor, zero: Any, name: str, value: Any) -> Any:
    from deepspeed.utils import safe_get_full_optimizer_state

    if not isinstance(value, Tensor) or value.ndim == 0:  # a count of steps, which is that of all
        return value
    return (
        safe_get_full_optimizer_state(parameter, name)
        if _shared(parameter, zero)
        else _own(parameter, zero, name)
    )


@torch.no_grad()
def put_states(zero: Any, stage: int, numbers: Mapping[int, int], states: Mapping[int, Any]) -> None:
    """Takes this rank's parts of the states of whole parameters, where there are any yet.

    Args:
        zero: DeepSpeed's optimizer.
        stage: 1, 2 or 3.
        numbers: id of a parameter -> its number in `states`.
        states: Number -> name -> value, which may not have been read.
    """
    for number, (group, flat, parameters) in enumerate(_parts(zero, stage) if states else ()):
        with _at_hand(zero, number):
            zero.optimizer.state[flat] = own = {
                name: torch.zeros_like(flat, requires_grad=False)
                if _is_stored_cut(value)
                else _scalar(value, group, flat)
                for name, value in states[numbers[id(parameters[0])]].items()
            }
            for parameter in parameters:
                saved = states[numbers[id(parameter)]]
                for name in filter(lambda name: _is_stored_cut(saved[name]), saved):
                    _put_state(zero, stage, parameter, own[name], read(saved[name]))


def _put_state(zero: Any, stage: int, parameter: Any, flat: Tensor, value: Tensor) -> None:
    if stage == 3:
        _, start, size = zero.grad_position[zero.get_param_id(parameter)]
        flat[start : start + size] = _own_part(value, parameter)
    elif (place := parameter._hp_mapping) is not None:  # else no part of it is this rank's
        own, there = place.lp_fragment_address, place.hp_fragment_address
        flat[there.start :][: there.numel] = value.flatten()[own.start :][: own.numel]


def _link(zero: Any, stage: int) -> None:
    if stage < 3:  # DeepSpeed does it after the first group's first step, when the others have no states yet
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _is_stored_cut(value: Any) -> bool:
    return isinstance(value, Tensor | sharded.Stored) and len(value.shape) > 0


def _scalar(value: Any, group: Mapping[str, Any], flat: Tensor) -> Any:
    value = read(value)
    if not isinstance(value, Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.to(flat.device if on_device else "cpu", copy=True)


def read(value: Any) -> Any:
    """Returns a tensor of a checkpoint, from its folder if it has not been read; anything else as it is."""
    if not isinstance(value, sharded.Stored):
        return value
    room = torch.empty(value.shape, dtype=value.dtype)
    sharded.fill([(value, room)])
    return room
