"""Steps that a rank tries by itself: collectives without the other ranks, for strategies that need them in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DropsSteps", "SendsActivations", "WithoutOthers"]


@runtime_checkable
class DropsSteps(Protocol):
    """A strategy under which a step that broke off leaves something behind."""

    def drop_step(self) -> None:
        """Drops what forward or backward left that broke off, and all gradients; called within `WithoutOthers`."""


@runtime_checkable
class SendsActivations(Protocol):
    """A strategy under which ranks may send each other activations, in messages whose shapes depend on the rows."""

    def activation_groups(self) -> Sequence[Any]:
        """Returns the groups of ranks that do; empty: none."""


class WithoutOthers(TorchDispatchMode):
    """While the mode is on, this process makes all collectives by itself: shapes and memory are right, values are not.

    What other ranks would send is what this rank sends. So a step takes as much memory as usual, and one that breaks off leaves
    no rank waiting. It covers what goes through torch's dispatcher: FSDP2, tensor parallelism, DTensors, DeepSpeed's stage 2.

    Args:
        first: How many; those that come after so many are made with the other ranks. None: all.

    Raises:
        NotImplementedError: For a collective that it does not know, before anything is sent.
    """

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self, first: int | None = None) -> None:
        super().__init__()
        self._left = first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as operators on local tensors, with the collectives between them
        namespace = getattr(func, "namespace", "")
        if namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _AFTERWARDS:
            return func(*args, **(kwargs or {}))
        if self._left == 0:
            return func(*args, **(kwargs or {}))
        if self._left is not None:
            self._left -= 1
        known = _IN_PLACE if namespace == "c10d" else _FUNCTIONAL
        if name not in known:
            raise NotImplementedError(f"{func} without other ranks")
        result = known[name](*args, **(kwargs or {}))
        return _with_work(func, args, result) if namespace == "c10d" else result


def _with_work(func: Any, args: Any, result: Any) -> Any:
    """Returns what the operator returns: its outputs, and a work that is done."""
    from torch._C._distributed_c10d import FakeWork, Work

    work = Work.boxed(FakeWork())
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _repeat(output: Tensor, own: Tensor, *_: Any, **__: Any) -> None:
    for part in output.view(-1, *own.shape) if own.numel() else ():
        if part.data_ptr() != own.data_ptr():  # what a rank gives may lie where it belongs in the whole
            part.copy_(own)


def _take(output: Tensor, given: Tensor, *_: Any, **__: Any) -> None:
    """Copies the beginning; what `given` is too short for becomes zero."""
    there = min(output.numel(), given.numel())
    output.view(-1)[:there].copy_(given.reshape(-1)[:there])
    output.view(-1)[there:].zero_()


def _each(one: Any) -> Any:
    def all_of(outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        for output, own in zip(outputs, inputs, strict=True):
            one(output, own)

    return all_of


def _keep(*_: Any, **__: Any) -> None:
    """Leaves the tensors as they are."""


def _gather_lists(outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> None:
    for own_outputs, own in zip(outputs, inputs, strict=True):
        for output in own_outputs:
            _take(output, own)


def _scatter_lists(outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any, **__: Any) -> None:
    for output, own in zip(outputs, inputs, strict=True):
        _take(output, own[0])


_AFTERWARDS = ("wait_tensor", "_wrap_tensor_autograd")
"""What happens to the output of a collective."""

_IN_PLACE = {
    "allreduce_": _keep,
    "allreduce_coalesced_": _keep,
    "broadcast_": _keep,
    "reduce_": _keep,
    "barrier": _keep,
    "_allgather_base_": _repeat,
    "allgather_": _gather_lists,
    "allgather_into_tensor_coalesced_": _each(_repeat),
    "_reduce_scatter_base_": _take,
    "reduce_scatter_": _scatter_lists,
    "reduce_scatter_tensor_coalesced_": _each(_take),
    "alltoall_base_": _take,
    "alltoall_": _each(_take),
}
"""Operators of c10d, which write into their first argument."""


def _copy(own: Tensor, *_: Any, **__: Any) -> Tensor:
    return own.clone()


def _same(own: Any, *_: Any, **__: Any) -> Any:
    return own


def _gathered(own: Tensor, size: int, *_: Any, **__: Any) -> Tensor:
    return own.repeat(size, *[1] * (own.ndim - 1))


def _scattered(own: Tensor, _: str, size: int, *__: Any) -> Tensor:
    return own[: len(own) // size].clone()


def _exchanged(own: Tensor, sizes: list[int], *_: Any, **__: Any) -> Tensor:
    output = own.new_empty((sum(sizes), *own.shape[1:]))
    _take(output, own)
    return output


_FUNCTIONAL = {
    "all_reduce": _copy,
    "all_reduce_": _same,
    "all_reduce_coalesced": lambda inputs, *_: [own.clone() for own in inputs],
    "broadcast": _copy,
    "broadcast_": _same,
    "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_coalesced": lambda inputs, size, *_: [_gathered(own, size) for own in inputs],
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_tensor_coalesced": lambda inputs, op, size, *_: [
        _scattered(own, op, size) for own in inputs
    ],
    "all_to_all_single": _exchanged,
}
"""Operators of torch's functional collectives, which return their outputs."""
