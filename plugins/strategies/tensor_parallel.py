"""Tensor parallelism: matrices sharded over ranks that have the same tokens, by the network's plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from core.contracts import Network


def apply(network: Network, mesh: DeviceMesh, sequence: bool, vocabulary: bool) -> None:
    """Shards a network on the meta device.

    Args:
        network: Changed in place.
        mesh: The ranks of one tensor-parallel group.
        sequence: Whether tokens are sharded where matrices are not (sequence parallelism).
        vocabulary: Whether the output weight is sharded along the vocabulary: logits are then DTensors, of which
            each rank holds its shard (use `torch.distributed.tensor.parallel.loss_parallel`).
    """
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    for name, styles in plan_of(network, sequence).items():
        for style in styles:
            parallelize_module(network, mesh, {name: style}, src_data_rank=None)
    if vocabulary:
        _split_vocabulary(network, mesh)
    for (
        name,
        parameter,
    ) in network.named_parameters():  # some of torch's styles make parameters that are trained
        if name in frozen:
            parameter.requires_grad_(False)


def forget_masks() -> None:
    """Forgets which ids other ranks embed, after a step that broke off before the parts of an embedding were added up.

    Torch keeps that in a cache from the one operation to the other, where nothing else leads to it, and the next step would
    find it there.
    """
    for found in gc.get_objects():
        kind = type(found)
        if kind.__name__ == "MaskBuffer" and kind.__module__.startswith("torch.distributed.tensor."):
            found.data, found.refcount = None, 0


def overlap(mesh: DeviceMesh) -> Callable[[], None]:
    """Lets the compiler run products of matrices and the messages beside them in pieces, at the same time.

    It is torch's asynchronous tensor parallelism: in compiled code gathers before products and scatters behind them become
    one operator each, which reads the pieces of other ranks from their memory.

    Args:
        mesh: The ranks of one tensor-parallel group, on GPUs of one machine.

    Returns:
        What undoes it.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    before, config._micro_pipeline_tp = config._micro_pipeline_tp, True
    return partial(setattr, config, "_micro_pipeline_tp", before)


def plan_of(network: Network, sequence: bool) -> dict[str, list[ParallelStyle]]:
    """Returns the network's plan with each of its values as a list."""
    plan = network.sequence_parallel_plan() if sequence else network.tensor_parallel_plan()
    return {name: style if isinstance(style, list) else [style] for name, style in plan.items()}


def compatibility_errors(network: Network, size: int, sequence: bool, vocabulary: bool) -> Iterator[str]:
    """Yields why a network cannot be sharded over `size` ranks."""
    plan, name = plan_of(network, sequence), type(network).__name__
    if not plan:
        yield f"{name} has no {'sequence' if sequence else 'tensor'}-parallel plan: set {'sequence' if sequence else 'tensor'} to 1"
    heads = network.attention_heads
    if heads and (odd := next((number for number in heads if number % size), None)):
        yield f"tensor is {size}, which does not divide the {odd} attention heads of {name}"
    if vocabulary and network.output_weight is None:
        yield f"{name} returns logits by itself: set loss_parallel to false"


def _split_vocabulary(network: Network, mesh: DeviceMesh) -> None:
    owner, name = _owner(network, network.output_weight)
    if isinstance(owner, nn.Embedding):  # tied
        parallelize_module(owner, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    else:
        weight = getattr(owner, name)
        split = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        owner.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))
    network.logits = partial(_logits, network, network.logits)  # type: ignore[method-assign]


def _owner(network: nn.Module, weight: Any) -> tuple[nn.Module, str]:
    return next(
        (module, name)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter is weight
    )


def _logits(network: Network, logits: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    weight = network.output_weight
    if isinstance(weight, DTensor) and not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return logits(hidden)
