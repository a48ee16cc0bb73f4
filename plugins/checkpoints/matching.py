"""Finds for each tensor of a network the stored tensor that it is read from, whatever form the weights have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError, nearest
from plugins.checkpoints import sharded
from plugins.checkpoints.checkpoint import read_checkpoint
from plugins.checkpoints.foreign import ForeignWeights
from toolkit.hugging_face import HasHuggingFaceForm, HuggingFaceForm, StoredTensor
from toolkit.safetensors_files import LazyTensor

PREFIX = "network."
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names of buffers that older versions of transformers stored, and compute again."""


def open_own(path: Path) -> dict[str, LazyTensor]:
    """Returns the network's tensors in a checkpoint of ours, a file or a folder, read when they are needed.

    Raises:
        ConfigError: If it is damaged or no checkpoint.
    """
    if sharded.is_sharded(path):
        source = sharded.opened_or_refused(path)
        found: Mapping[str, Any] = sharded.read_without_tensors(source)["state_dict"]
    else:
        found = read_checkpoint(path)["state_dict"]
    own = {name.removeprefix(PREFIX): v for name, v in found.items() if name.startswith(PREFIX)}
    return {
        name: LazyTensor(tuple(value.shape), value.dtype, partial(_read, value))
        for name, value in own.items()
        if hasattr(value, "shape")
    }


def stored_data(path: Path) -> Mapping[str, Any]:
    """Returns what a checkpoint keeps of the data module, with its tokenizer; empty: nothing."""
    content = sharded.state(path) if sharded.is_sharded(path) else read_checkpoint(path)
    states = (value for value in content.values() if isinstance(value, Mapping))
    return next((state for state in states if isinstance(state.get("tokenizer"), str)), {})


def _read(value: Any) -> Tensor:
    return sharded.load_tensor(value) if isinstance(value, sharded.Stored) else value.detach()


def form_of(network: Any, config: Mapping[str, Any] | None) -> HuggingFaceForm | None:
    """Returns the form of a network that a config.json is of; without one its first. None: it has none."""
    if not isinstance(network, HasHuggingFaceForm):
        return None
    forms = list(network.hugging_face.forms())
    wanted = (config or {}).get("architectures") or [forms[0].architecture]
    bare = (config or {}).get("model_type") if str(wanted[0]).endswith("Model") else None  # without its head
    return next((form for form in forms if form.architecture in wanted or form.model_type == bare), None)


def pieces_of(
    found: ForeignWeights,
    form: HuggingFaceForm,
    shapes: Mapping[str, tuple[int, ...]],
    left_out: tuple[str, ...] = (),
) -> dict[str, LazyTensor]:
    """Returns the tensors of a network of ours, each a part of one that is stored.

    Args:
        found: The stored weights.
        form: How its names and ours belong together.
        shapes: Shapes of our tensors. How many rows each has matters only where one of theirs holds several.
        left_out: Beginnings of further names of theirs that are not needed.

    Raises:
        ConfigError: If one is missing, or one is left over; names the nearest.
    """
    plan, there = form.tensors(shapes), dict(found.tensors)
    names = {stored.theirs: _name_there(stored.theirs, there) for stored in plan}
    if missing := [name for name, other in names.items() if other is None]:
        raise ConfigError(f"{found.path} has no {missing[0]}.{nearest(missing[0], set(there))}")
    left = [name for name in there if name not in names.values() and not name.endswith(IGNORED)]
    unused = (*form.left_out, *left_out)
    if left := [name for name in left if name not in form.copies and not name.startswith(unused)]:
        raise ConfigError(
            f"{found.path} has {ascii(left[0])[1:-1][:100]}, for which the network has no place.{nearest(left[0], set(names))}"
        )
    result: dict[str, LazyTensor] = {}
    experts: dict[str, list[LazyTensor]] = {}
    for stored in plan:
        tensor = there[str(names[stored.theirs])]
        if stored.index is not None:
            experts.setdefault(stored.ours[0], []).append(tensor)
        else:
            result |= dict(_split(stored, tensor, shapes))
    result |= {name: _stack(found.path, name, parts) for name, parts in experts.items()}
    return {name: result[name] for name in shapes}


def _stack(path: Path, name: str, parts: list[LazyTensor]) -> LazyTensor:
    """Returns the tensor of all experts, given those of each in their order."""
    if odd := [part.shape for part in parts if part.shape != parts[0].shape]:
        raise ConfigError(f"{path}: experts of {name} are {parts[0].shape} and {odd[0]}.")

    def read() -> Tensor:
        stack = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
        for target, part in zip(stack, parts, strict=True):
            target.copy_(part.read())
        return stack

    return LazyTensor((len(parts), *parts[0].shape), parts[0].dtype, read)


def has_own_names(
    found: ForeignWeights, form: HuggingFaceForm | None, shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Returns whether tensors have the names of the network rather than those of transformers.

    Some are the same, where a model was stored without its head.
    """
    own = sum(name in found.tensors for name in shapes)
    plan = form.tensors(shapes) if form is not None and own else []
    return own > sum(_name_there(stored.theirs, found.tensors) is not None for stored in plan)


def _name_there(name: str, there: Iterable[str]) -> str | None:
    """Returns a tensor's name in files that may hold a model without its head, whose names lack the first word."""
    return next((other for other in (name, name.partition(".")[2]) if other in there), None)


def _whole(stored: StoredTensor, tensor: LazyTensor, shape: tuple[int, ...]) -> Tensor:
    return stored.to_ours(tensor.read(), shape[:1])[0]


def _split(
    stored: StoredTensor, tensor: LazyTensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterable[tuple[str, LazyTensor]]:
    """Yields the tensors of ours that one of theirs holds."""
    turned = stored.transposed and len(tensor.shape) == 2
    shape = tensor.shape[::-1] if turned else tensor.shape
    if len(stored.ours) == 1:  # its size may be another: rows may be added

        def read_part(place: tuple[slice, ...]) -> Tensor:
            return tensor.part(place[::-1]).t() if turned else tensor.part(place)

        whole = partial(_whole, stored, tensor, shape)
        yield stored.ours[0], LazyTensor(shape, tensor.dtype, whole, read_part)
        return
    sizes = [shapes[name][0] for name in stored.ours]
    if not shape or shape[0] != sum(sizes):
        raise ConfigError(
            f"{stored.theirs} is {tensor.shape} there; {', '.join(stored.ours)} have {sizes} rows."
        )
    for place, name in enumerate(stored.ours):

        def read(place: int = place) -> Tensor:
            return stored.to_ours(tensor.read(), sizes)[place].clone()  # not the memory of all of it

        yield name, LazyTensor((sizes[place], *shape[1:]), tensor.dtype, read)
