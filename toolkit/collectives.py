"""The collectives of a step: which, how many bytes, from when to when; and when the process computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

__all__ = ["COLLECTIVES", "Collective", "WatchCollectives"]

COLLECTIVES = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"),
    "all_gather": (
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
    ),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_", "broadcast"),
    "send": ("send", "isend"),
    "recv": ("recv_", "recv_any_source_", "irecv"),
}
"""What we call a collective -> the operators of torch that make it, those of c10d and those that are compiled."""

_NAMES = {operator: name for name, operators in COLLECTIVES.items() for operator in operators}


@dataclass(slots=True)
class Collective:
    """One collective of this rank.

    Attributes:
        name: One of `COLLECTIVES`.
        bytes: Size of the tensor that is reduced, sent or received, or, of a gathered or scattered one, of the whole.
        begin: When it was started.
        end: When it was complete; None: torch does not say, as for send and recv on gloo.
    """

    name: str
    bytes: int
    begin: Any
    end: Any = None


class WatchCollectives(TorchDispatchMode):
    """Notes the collectives that this process starts while the mode is on, in forward and backward of any strategy.

    It sees what goes through torch's dispatcher: DDP, FSDP2, tensor parallel, pipelines. What is inside of a compiled graph or
    goes past torch, such as DeepSpeed's own kernels, it does not see. The order of things stays: it waits for nothing. Of a
    process all that watch have the same one: begin with `start`, end with `stop`.

    Args:
        now: Returns the moment, as `PhaseClock.now`.

    Attributes:
        collectives: What was started.
        computing: (begin, end) of each other operator, in which the process, or the device, computed.
    """

    supports_higher_order_operators = True  # flex_attention is one
    _current: WatchCollectives | None = None
    _users = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leaves compiled graphs compiled."""
        return True

    @classmethod
    def start(cls, now: Callable[[], Any]) -> WatchCollectives | None:
        """Begins to watch; None: another mode is active, with which torch's record of modes would get out of order."""
        if cls._current is None:
            if _get_current_dispatch_mode() is not None:
                return None
            cls._current = cls(now)
            cls._current.__enter__()
        cls._users += 1
        return cls._current

    def stop(self) -> None:
        """Ends it, once all that watch have called this."""
        kind = type(self)
        kind._users -= 1
        if not kind._users:
            self.settle()
            kind._current = None
            self.__exit__(None, None, None)

    def __init__(self, now: Callable[[], Any]) -> None:
        super().__init__()
        self.now, self.collectives = now, list[Collective]()
        self.computing: list[tuple[Any, Any]] = []
        self._unfinished: list[tuple[Any, Collective]] = []
        self._waited: dict[int, Collective] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as operators on local tensors, with the collectives between them
        begin = self.now()
        result = func(*args, **(kwargs or {}))
        self.settle()
        if not isinstance(func, OpOverload):  # of higher order: no collective
            self.computing.append((begin, self.now()))
            return result
        operator = func.overloadpacket.__name__
        if func.namespace == "c10d" and operator in _NAMES:
            self._follow(Collective(_NAMES[operator], _size(_NAMES[operator], args), begin), result)
        elif func.namespace == "_c10d_functional":
            self._functional(operator, begin, args, result)
        elif func.namespace != "c10d":
            self.computing.append((begin, self.now()))
        return result

    def settle(self) -> None:
        """Notes which of the works that call nobody when they end have ended by now."""
        for item in [item for item in self._unfinished if item[0].is_completed()]:
            item[1].end = self.now()
            self._unfinished.remove(item)

    def _follow(self, collective: Collective, result: Any) -> None:
        from torch._C._distributed_c10d import Work

        self.collectives.append(collective)
        work = Work.unbox(result[-1] if isinstance(result, tuple) else result)
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has none for this collective
            self._unfinished.append((work, collective))
            return

        def done(_: Any) -> None:
            collective.end = self.now()

        future.add_done_callback(done)

    def _functional(self, operator: str, begin: Any, args: Any, result: Any) -> None:
        if operator in _NAMES:
            sized = (args, result) if _NAMES[operator] == "all_gather" else (args,)
            collective = Collective(_NAMES[operator], max(map(_bytes, sized)), begin)
            self.collectives.append(collective)
            for tensor in _tensors(result):
                self._waited[tensor.data_ptr()] = collective
        elif operator == "wait_tensor" and (known := self._waited.pop(args[0].data_ptr(), None)):
            known.end = self.now()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _size(name: str, args: Any) -> int:
    """Returns the bytes of a collective of c10d: its tensors come first, the output before the input."""
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return max(_bytes(args[0]), _bytes(args[1]))
    return _bytes(args[0])
