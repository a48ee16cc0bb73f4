"""Activation offload: activations wait in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from core.contracts import Network
from core.errors import ConfigError
from core.technique import technique
from toolkit.further_blocks import further_blocks


@technique(
    paper="ZeRO-Offload's idea for activations, arXiv:2101.06840; torch.autograd.graph.saved_tensors_hooks",
    after=("ActivationCheckpointing",),
    offers=("keeps_weights",),
)
class ActivationOffload(Callback):
    """Keeps the activations that the network's blocks save for backward in pinned host memory.

    Losses, gradients and weights are bitwise those of a run without it. On CUDA copies have streams of their own: those
    of a block leave while the next one is computed, and come back while backward computes the block behind it. So
    the device holds the activations of two blocks. Those of the last block stay there, as backward begins with them: it would
    wait for their way back. They are copied all the same: where another forward comes before backward, as in a pipeline,
    they leave, too.
    Pinned memory is used again in each step. Weights and their casts, such as those of autocast, stay on the device: what
    has the shape of a weight of the block. Together with `ActivationCheckpointing`, the kept inputs of the blocks are moved.
    On a CPU nothing is copied: the run is the same and needs as much memory.

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
        offload_blocks([*network.blocks, *further_blocks(network)], self.min_bytes)


def offload_blocks(blocks: list[nn.Module], min_bytes: int = 0) -> None:
    """Moves the saved tensors of modules, in the order of forward, to the host until backward: those of so many bytes."""
    tape = _Tape(min_bytes)
    for block in blocks:
        shapes = {tuple(weight.shape) for weight in block.parameters() if weight.ndim > 1}
        shapes |= {shape[::-1] for shape in shapes}
        block.forward = partial(_forward, block.forward, tape, shapes)  # type: ignore[method-assign]


def _forward(
    forward: Callable[..., Any], tape: _Tape, weights: set[tuple[int, ...]], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    group = _Group(tape, weights, tape.last())
    with saved_tensors_hooks(group.pack, _unpack):
        result = forward(*args, **kwargs)
    tape.end(group)
    return result


def _moves(tensor: Tensor, min_bytes: int) -> bool:
    size = tensor.numel() * tensor.element_size()
    return tensor.device.type != "cpu" and size >= max(min_bytes, 1)


class _Lane:
    """Copies between a device and the host; on CUDA in a stream for each direction, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[tuple[Tensor, Any]]()
        self.pinned = device.type == "cuda" and torch.cuda.is_available()
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self.pinned else []

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copies after what was computed so far, and after another event; returns the event of its end."""
        if not self._streams:
            target.copy_(source)
            return None
        stream = self._streams[target.is_cuda]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """Lets what is computed from now on wait for an event; the host goes on."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def take(self, size: int) -> tuple[Tensor, Any]:
        """Returns host memory of at least so many bytes, and the event after which it may be written.

        It is the smallest that is free. Where none fits, the largest is given up for new memory: after a step
        with the same lengths all fit, and longer sequences do not add to what shorter ones had.
        """
        fits = [index for index, (memory, _) in enumerate(self._free) if memory.numel() >= size]
        if fits:
            return self._free.pop(min(fits, key=lambda index: self._free[index][0].numel()))
        if self._free:
            self._free.pop(max(range(len(self._free)), key=lambda index: self._free[index][0].numel()))
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned), None

    def give(self, memory: Tensor, read: Any) -> None:
        """Takes host memory back, which may be written after an event."""
        self._free.append((memory, read))


class _Copy:
    """A tensor that is on the host, on the device, or on both.

    Attributes:
        uses: How often backward will still ask for it.
    """

    def __init__(self, lane: _Lane, tensor: Tensor, memory: Tensor, free: Any) -> None:
        self._lane, self._memory, self.uses = lane, memory, 0
        self._layout = torch.empty_like(tensor, device="meta")  # in memory as it is, without gaps
        self._arrived: Any = None
        self._tensor: Tensor | None = tensor.detach()  # with its history it would keep itself alive
        self._device = tensor.device
        self._left = lane.copy(self._tensor, self._host, free)

    @property
    def _host(self) -> Tensor:
        layout = self._layout
        flat = self._memory[: layout.numel() * layout.element_size()].view(layout.dtype)
        return flat.as_strided(layout.shape, layout.stride())

    def release(self) -> None:
        """Frees the memory on the device, once it is on the host."""
        self._lane.wait(self._left)
        self._tensor = None

    def fetch(self) -> None:
        """Starts to copy it to the device, unless it is there."""
        if self._tensor is None:
            layout = self._layout
            self._tensor = torch.empty_strided(
                layout.shape, layout.stride(), dtype=layout.dtype, device=self._device
            )
            self._arrived = self._lane.copy(self._host, self._tensor, self._left)

    def use(self) -> Tensor:
        """Returns it on the device; after the last use nothing keeps it there."""
        self.fetch()
        self._lane.wait(self._arrived)
        found = self._tensor
        assert found is not None
        self.uses -= 1
        if self.uses <= 0:
            self.release()
        return found

    def __del__(self) -> None:
        if self._tensor is not None:  # a copy in flight would write into memory of others
            self._lane.wait(self._arrived)
        self._lane.give(self._memory, self._arrived)


@dataclass
class _Tape:
    """What the blocks of a network have in common."""

    min_bytes: int
    last: Callable[[], _Group | None] = lambda: None
    lanes: dict[torch.device, _Lane] = field(default_factory=dict)
    known: dict[Any, tuple[StorageWeakRef, ref[_Copy]]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> _Tape:
        return _Tape(self.min_bytes)

    def copy_of(self, tensor: Tensor) -> _Copy:
        """Returns the copy of a tensor: what several operators or blocks save is copied once."""
        # as long as this reference is kept, no other storage gets its number
        storage = StorageWeakRef(tensor.untyped_storage())
        place = storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*place, tensor.dtype, tensor._version)
        _, known = self.known.get(key, (None, lambda: None))
        found = known()
        if found is None:
            if tensor.device not in self.lanes:
                self.lanes[tensor.device] = _Lane(tensor.device)
            lane = self.lanes[tensor.device]
            found = _Copy(lane, tensor, *lane.take(tensor.numel() * tensor.element_size()))
            self.known[key] = storage, ref(found)
        return found

    def end(self, group: _Group) -> None:
        """Ends the forward of a block: what the one before saved has left by now."""
        if (before := group.before()) is not None and not before.begun:
            for copy in before.kept():
                if id(copy) not in group.copies:
                    copy.release()
        self.last = ref(group)
        kept = self.known.items()
        self.known = {key: one for key, one in kept if one[1]() is not None and not one[0].expired()}


class _Group:
    """What a block saved in one forward.

    Attributes:
        before: Returns that of the block before, whose backward comes next, as long as it waits for it.
        begun: Whether its backward has begun.
        copies: Of its tensors, by their `id`, in the order of forward.
    """

    def __init__(self, tape: _Tape, weights: set[tuple[int, ...]], before: _Group | None) -> None:
        self._tape, self._weights = tape, weights
        self.before: Callable[[], _Group | None] = (lambda: None) if before is None else ref(before)
        self.copies: dict[int, ref[_Copy]] = {}
        self.begun = False

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd keeps in place of a tensor."""
        if self._is_weight(tensor):
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            found = {name: getattr(tensor, name) for name in names}
            parts = {name: self.pack(one) if isinstance(one, Tensor) else one for name, one in found.items()}
            return _Wrapped(type(tensor), parts, context, tensor.shape, tensor.stride())
        if not _moves(tensor, self._tape.min_bytes):
            return tensor
        copy = self._tape.copy_of(tensor)
        copy.uses += 1
        self.copies[id(copy)] = ref(copy)
        return _Packed(self, copy)

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight, a cast of one, or a view of either, such as its transpose in a product.

        Activations (B, T, C) are flattened for products: (B T, C) may be the shape of a weight.
        """
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return True
        alike = tuple(tensor.shape) in self._weights and base.ndim in (1, tensor.ndim)
        return alike or (tuple(base.shape) in self._weights and tensor.ndim <= base.ndim)

    def begin(self) -> None:
        """Begins its backward: starts to fetch what it needs, and then what the next one needs."""
        if self.begun:
            return
        self.begun = True
        for group in (self, self.before()):
            for copy in () if group is None else group.kept():
                copy.fetch()

    def kept(self) -> Iterator[_Copy]:
        """Yields the copies that backward has not yet let go of, in its order."""
        for found in reversed(self.copies.values()):
            if (copy := found()) is not None:
                yield copy


class _Packed(NamedTuple):
    group: _Group
    copy: _Copy


class _Wrapped(NamedTuple):
    """A tensor that consists of others, such as a DTensor."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Wrapped):
        parts = {name: _unpack(part) for name, part in packed.parts.items()}
        found: Tensor = packed.kind.__tensor_unflatten__(parts, packed.context, packed.shape, packed.stride)
        return found
    if isinstance(packed, _Packed):
        packed.group.begin()
        return packed.copy.use()
    tensor: Tensor = packed
    return tensor
