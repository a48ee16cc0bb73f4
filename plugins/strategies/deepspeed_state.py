"""Gathers DeepSpeed's flat partitions for a checkpoint, and loads them from one.

DeepSpeed's own checkpoints are pickles for one stage and one number of ranks; they are neither written nor read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plugins.checkpoints import sharded


def is_cut(parameter: Any) -> bool:
    """Returns whether a parameter is sharded by DeepSpeed (stage 3)."""
    return hasattr(parameter, "ds_id")


def with_full_shapes(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replaces sharded parameters by meta tensors of the full shape: a hook of `state_dict`."""
    parameters: Iterator[tuple[str, Any]] = module.named_parameters(remove_duplicate=False)
    for name, parameter in parameters:
        key = prefix + name
        if is_cut(parameter) and key in state and not isinstance(state[key], nn.Parameter):
            state[key] = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")


@contextmanager
def in_full_shape(module: nn.Module) -> Iterator[None]:
    """Gives sharded parameters their full shape, without memory, for what chooses among them by their dimensions."""
    cut: list[Any] = [parameter for parameter in module.parameters() if is_cut(parameter)]
    present = [parameter.data for parameter in cut]
    for parameter in cut:
        parameter.data = parameter.data.new_empty(()).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, data in zip(cut, present, strict=True):
            parameter.data = data


# -- weights -----------------------------------------------------------------------------------------


@torch.no_grad()
def full_weight(tensor: Tensor, zero: Any) -> Tensor:
    """Returns the optimizer's full float32 copy of a parameter, or a buffer; called on every rank.

    Args:
        tensor: Parameter or buffer.
        zero: DeepSpeed's optimizer; None if nothing is trained.
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
    """Returns the full value in stage 3 on one rank as a view: the host may lack memory for a copy."""
    part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True, optim_state_key=name)
    full: Tensor = part[: parameter.ds_numel].view(parameter.ds_shape)
    return full


@torch.no_grad()
def put_weight(tensor: Tensor, value: Tensor, zero: Any) -> None:
    """Fills a parameter or buffer from a full one; called on every rank, and then `copy_weights_to_network`."""
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
def copy_weights_to_network(zero: Any, stage: int) -> None:
    """Copies the weights from the optimizer's partitions to the network."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for number in range(len(zero.fp16_groups)):
        with _at_hand(zero, number):
            zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:  # not sharded: every rank has them in full between steps
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


@contextmanager
def _at_hand(zero: Any, number: int) -> Iterator[None]:
    """Swaps one flat partition in from NVMe, if it is there, and out again."""
    swapped = getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(number)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(number)
    yield
    if swapped:
        zero._optimizer_states_and_gradient_swap_out(number)


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's partition of a flattened tensor, padded with zeros on the last rank."""
    size = parameter.ds_tensor.numel()
    own = value.flatten()[dist.get_rank() * size :][:size]
    return nn.functional.pad(own, (0, size - own.numel()))


def weight_part(parameter: Any, zero: Any) -> Tensor:
    """Returns this rank's part of a trained weight in the optimizer's float32, flat, without padding; a view if it is in memory."""
    if is_cut(parameter):
        part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True)
        part = _unpadded(part.detach(), parameter)
        return part.clone() if zero.swap_optimizer else part  # from NVMe it is in memory that is used again
    place = parameter._hp_mapping
    return _nothing(parameter) if place is None else place.hp_fragment.detach()


def gradient_part(parameter: Any, zero: Any) -> Tensor:
    """Returns this rank's part of what DeepSpeed steps by, without padding, between backward and step; a view."""
    if is_cut(parameter):
        part, _ = zero._get_fp32_grad_state_partition(parameter, release_swap_buffers=True)
        return _unpadded(part, parameter)
    place = parameter._hp_mapping
    if place is None:
        return _nothing(parameter)
    found: Tensor = place.get_lp_grad_fragment(parameter._index_in_param_group)
    return found


def drop_step(zero: Any) -> None:
    """Puts DeepSpeed's optimizer into the state before a step that broke off, in stages 1 and 2 without offloading."""
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    for number in range(len(zero.params_already_reduced)):
        zero.params_already_reduced[number] = False
    zero._release_ipg_buffers()
    zero._release_preflattened_grad_buffers()
    zero.zero_grad()
    for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))
    for flat in zero.single_partition_of_fp32_groups:
        flat.grad = None
    zero.micro_step_id = -1
    zero._backward_active_depth = 0
    zero.clear_backward_seen_flag()


def _nothing(parameter: Tensor) -> Tensor:
    return parameter.detach().new_empty(0, dtype=torch.float32)


def _unpadded(part: Tensor, parameter: Any) -> Tensor:
    """Returns the elements of a partition that belong to the parameter: the last ranks may have fewer, or none."""
    left = parameter.ds_numel - dist.get_rank() * parameter.ds_tensor.numel()
    return part[: max(left, 0)]


# -- states of the optimizer -------------------------------------------------------------------------


def _parts(zero: Any, stage: int) -> list[tuple[dict[str, Any], Tensor, list[Any]]]:
    """Returns (parameter group, flat partition, parameters in it) for each flat partition."""
    groups = zero.optimizer.param_groups
    if stage < 3:
        return list(zip(groups, zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))
    owners = [groups[zero.sub_group_to_group_id[number]] for number in range(len(zero.fp16_groups))]
    return list(zip(owners, zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))


def flat_weights(zero: Any, stage: int) -> list[Tensor]:
    """Returns this rank's flat partitions of the weights in float32, which the optimizer steps; no copies."""
    return [flat for _, flat, _ in _parts(zero, stage)]


@torch.no_grad()
def full_states(
    zero: Any, stage: int, numbers: Mapping[int, int], keep: Callable[[Any], bool]
) -> dict[int, dict[str, Any]]:
    """Returns the full optimizer state of each parameter, on the CPU; called on every rank.

    Args:
        zero: DeepSpeed's optimizer.
        stage: 1, 2 or 3.
        numbers: id of a parameter -> its index in the optimizer of a single process.
        keep: Returns whether this rank keeps the state of a parameter.
    """
    states: dict[int, dict[str, Any]] = {}
    _link(zero, stage)
    for _, flat, parameters in _parts(zero, stage):
        own = zero.optimizer.state.get(flat, {})
        for parameter in parameters if own else ():
            found = {name: _full_state(parameter, zero, name, value) for name, value in own.items()}
            if keep(parameter):
                on_host = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in found.items()}
                states[numbers[id(parameter)]] = on_host
    return dict(sorted(states.items()))


def _full_state(parameter: Tensor, zero: Any, name: str, value: Any) -> Any:
    from deepspeed.utils import safe_get_full_optimizer_state

    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0:  # the step count: one for all parameters here, one for each in a single process
        return value.clone()
    return (
        safe_get_full_optimizer_state(parameter, name)
        if _shared(parameter, zero)
        else _own(parameter, zero, name)
    )


@torch.no_grad()
def put_states(zero: Any, stage: int, numbers: Mapping[int, int], states: Mapping[int, Any]) -> None:
    """Loads this rank's partitions of the full optimizer states, if there are any.

    Args:
        zero: DeepSpeed's optimizer.
        stage: 1, 2 or 3.
        numbers: id of a parameter -> its index in `states`.
        states: Index -> name -> value, possibly not read yet.
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
                    _put_state(zero, stage, parameter, own[name], load_stored(saved[name]))


def _put_state(zero: Any, stage: int, parameter: Any, flat: Tensor, value: Tensor) -> None:
    if stage == 3:
        _, start, size = zero.grad_position[zero.get_param_id(parameter)]
        flat[start : start + size] = _own_part(value, parameter)
    elif (place := parameter._hp_mapping) is not None:  # None: this rank has no part of it
        own, there = place.lp_fragment_address, place.hp_fragment_address
        flat[there.start :][: there.numel] = value.flatten()[own.start :][: own.numel]


def _link(zero: Any, stage: int) -> None:
    if (
        stage < 3
    ):  # DeepSpeed links states after the first group's first step, when the other groups have none yet
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _is_stored_cut(value: Any) -> bool:
    return isinstance(value, Tensor | sharded.Stored) and len(value.shape) > 0


def _scalar(value: Any, group: Mapping[str, Any], flat: Tensor) -> Any:
    value = load_stored(value)
    if not isinstance(value, Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.to(flat.device if on_device else "cpu", copy=True)


def load_stored(value: Any) -> Any:
    """Reads a stored tensor from its checkpoint folder; returns other values as they are."""
    if not isinstance(value, sharded.Stored):
        return value
    room = torch.empty(value.shape, dtype=value.dtype)
    sharded.load_tensors([(value, room)])
    return room
