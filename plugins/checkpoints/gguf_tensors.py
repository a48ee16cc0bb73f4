"""The tensors of a network in a GGUF file, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from plugins.checkpoints.gguf_families import Family
from plugins.checkpoints.gguf_metadata import FREQUENCIES, frequencies
from toolkit.gguf_files import GGUFFile
from toolkit.hugging_face import HuggingFaceForm
from toolkit.safetensors_files import LazyTensor


def to_tensors(
    family: Family, form: HuggingFaceForm, config: Mapping[str, Any], own: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Returns the tensors of a file, for those of a network of ours."""
    found: dict[str, LazyTensor] = {}
    for stored in form.tensors({name: tensor.shape for name, tensor in own.items()}):
        parts = [own[name] for name in stored.ours]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        theirs = re.sub(r"\.experts\.\d+\.", ".experts.*.", stored.theirs) if stored.index is not None else stored.theirs  # fmt: skip
        name = _renamed(theirs, {there: here for here, there in family.names.items()})
        if name is None:
            raise ConfigError(f"GGUF's {family.name} has no place for {stored.theirs}.")
        if name in found:  # the next expert of a stack
            continue
        change = _change(family, config, name, back=False)

        def read(parts: list[LazyTensor] = parts, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            tensors = [part.read() for part in parts]
            return change(tensors[0] if len(tensors) == 1 else torch.cat(tensors))

        found[name] = LazyTensor(shape, parts[0].dtype, read)
    if (rope := frequencies(config)) is not None:
        found[FREQUENCIES] = LazyTensor(tuple(rope.shape), torch.float32, lambda: rope)
    return found


def from_tensors(family: Family, config: Mapping[str, Any], file: GGUFFile) -> dict[str, LazyTensor]:
    """Returns a file's tensors under the names of transformers, in its order."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in file.tensors.items():
        if name == FREQUENCIES:
            continue
        theirs = _renamed(name, family.names)
        if theirs is None:
            raise ConfigError(
                f"{file.path} has {ascii(name)[1:-1][:80]}, which {family.name} has no place for."
            )
        change = _change(family, config, name, back=True)
        if "*" in theirs:
            for index in range(tensor.shape[0]):

                def read_one(index: int = index, name: str = name) -> Tensor:
                    return file.rows[name](index)

                found[theirs.replace("*", str(index))] = LazyTensor(tensor.shape[1:], tensor.dtype, read_one)
            continue
        turned = family.transposed and name.startswith("blk.") and len(tensor.shape) == 2

        def read(
            tensor: LazyTensor = tensor, change: Callable[[Tensor], Tensor] = change, turned: bool = turned
        ) -> Tensor:
            value = change(tensor.read())
            return value.t() if turned else value

        found[theirs] = LazyTensor(tensor.shape[::-1] if turned else tensor.shape, tensor.dtype, read)
    return found


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    """Returns a tensor's name in the other form, with a "*" for the number of an expert where GGUF has none."""
    module, _, leaf = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)(?:\d+|\*)(?=\.)", module + ".")
    found = table.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", module + ".").removesuffix("."))
    if found is None:
        return None
    for number in numbers[: found.count("*")]:
        found = found.replace("*", number, 1)
    return f"{found}.{leaf}"


def _change(family: Family, config: Mapping[str, Any], name: str, back: bool) -> Callable[[Tensor], Tensor]:
    """Returns what makes the values of GGUF of those of transformers, or `back`."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    module = name.rpartition(".")[0].rpartition(".")[2]
    if family.adjacent and module in heads:
        count = int(config[heads[module]])

        def reorder(tensor: Tensor) -> Tensor:
            sizes = (count, -1, 2) if back else (count, 2, len(tensor) // count // 2)
            return tensor.reshape(*sizes, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

        return reorder
    if family.added and module.endswith("norm"):
        return lambda tensor: tensor + (-family.added if back else family.added)
    return lambda tensor: tensor
