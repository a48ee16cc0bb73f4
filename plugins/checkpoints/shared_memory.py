"""Separates tensors of a checkpoint that share memory, as in files that DeepSpeedZero wrote in earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def separate(state: Mapping[str, Any]) -> int:
    """Gives each tensor of an optimizer's state memory of its own; returns how many shared it.

    Optimizers change their state in place, one parameter after another: a step count that all parameters
    share would be incremented once for each of them. Tensors keep their memory when a checkpoint is read, and
    `Optimizer.load_state_dict` copies nothing that is on the right device already.

    Args:
        state: As of `Optimizer.state_dict`, in plain tensors; changed in place. Others are skipped.
    """
    places = sorted(_places(state["state"]), key=lambda place: _span(place[2]))
    end, found = 0, 0
    for values, name, tensor in places:
        start, last = _span(tensor)
        if start < end:
            values[name] = tensor.clone()
            found += 1
        else:
            end = last
    return found


def _places(values: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yields (container, key, tensor) for each tensor in nested dicts and lists that has memory of its own to check."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in pairs:
        if isinstance(value, dict | list):
            yield from _places(value)
        elif type(value) is Tensor and value.numel() and not value.is_meta and not value.is_sparse:
            yield values, name, value


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first byte, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
