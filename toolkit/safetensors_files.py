"""Reads and writes safetensors files tensor by tensor; the library's own writer takes all of them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from toolkit.bounded import open_inside, read_error

__all__ = ["DTYPES", "LazyTensor", "read_safetensors", "write_safetensors"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in a header -> data type, of those that weights have."""

COUNTED = "embeddings.position_ids"
"""End of the name of 0, 1, 2 and so on, which older versions of transformers stored: it is passed over."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed.

    Attributes:
        shape: Its shape.
        dtype: Its data type.
        read: Returns it, on the CPU; each call reads it again.
        read_part: Returns a part of it, given a slice of each dimension, and reads no more; None: the whole is read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_part: Callable[[tuple[slice, ...]], Tensor] | None = None

    def part(self, place: tuple[slice, ...]) -> Tensor:
        """Returns a part, on the CPU.

        Args:
            place: A slice of each dimension.
        """
        return self.read()[place] if self.read_part is None or not place else self.read_part(place)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def read_safetensors(folder: Path, name: str) -> dict[str, LazyTensor]:
    """Returns the tensors of a file in a folder, none of which is read yet.

    Raises:
        ConfigError: If it is missing, cut off, damaged, outside of the folder or not a regular file, or has tensors of a
            type that is none of `DTYPES`.
    """
    from safetensors import SafetensorError

    try:
        open_inside(folder, name).close()  # a regular file, and inside
        return dict(_tensors(folder / name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ascii(name)[1:-1]} cannot be read: {read_error(error)}.") from error
    except SafetensorError as error:
        what = str(error).partition("\n")[0][:200]
        raise ConfigError(f"{folder / name} is damaged or no safetensors file: {what}.") from error


def _tensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="pt") as file:  # holds the header against the size of the file
        for key in file.keys():  # noqa: SIM118  # not a mapping
            if key.endswith(COUNTED):
                continue
            described = file.get_slice(key)
            if (dtype := DTYPES.get(described.get_dtype())) is None:
                raise ConfigError(
                    f"{path}: {ascii(key)[1:-1][:80]} is of type {described.get_dtype()}; {', '.join(DTYPES)} can be read."
                )
            shape = tuple(described.get_shape())
            yield key, LazyTensor(shape, dtype, partial(_read, path, key), partial(_read, path, key))


def _read(path: Path, key: str, place: tuple[slice, ...] | None = None) -> Tensor:
    from safetensors import safe_open

    # opened again each time: pages that were read are given back
    with safe_open(os.fspath(path), framework="pt") as file:
        tensor: Tensor = file.get_tensor(key) if place is None else file.get_slice(key)[place]
        return tensor


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes a file: 8 bytes with the length of the header, the header as JSON, the tensors one after the other.

    See https://github.com/huggingface/safetensors#format. One tensor at a time is in memory.

    Args:
        path: The file; it is replaced.
        tensors: Name -> tensor. Those of larger types come first, so that all are aligned.

    Raises:
        OSError: If it cannot be written.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        described = {"dtype": names[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = described | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(as_bytes(tensors[name].read()))


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor on the CPU, in row-major order."""
    content: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(content)
