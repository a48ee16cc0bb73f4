"""Reads GGUF files: metadata at once, tensors one by one and dequantised, by the package `gguf`.

The header is parsed here: the reader of `gguf` makes an object of each token of a vocabulary, which takes seconds, and
does not hold counts against the size of the file.
See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError
from toolkit.bounded import MOST_BYTES, open_inside, read_error
from toolkit.safetensors_files import LazyTensor

__all__ = ["GGUFFile", "read_gguf", "require_gguf"]

MAGIC, VERSIONS = b"GGUF", (2, 3)

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> its form for `struct`."""

STRING, ARRAY, FLOAT32 = 8, 9, 6

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of tensors that are read as they are; all others become float32."""

QUANTISED = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
"""Types that `gguf` dequantises."""

MOST_DIMENSIONS, MOST_PARTS = 4, 10_000

PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""The name of a file that is one of several parts."""


@dataclass(frozen=True)
class GGUFFile:
    """What a file holds.

    Attributes:
        path: The file, or one of its parts.
        metadata: Key -> number, string, or list of them. A float32 is the shortest decimal that rounds to it.
        tensors: Name -> tensor, the last dimension of which is contiguous as in torch. Quantised ones are float32.
        rows: Name -> function that reads one entry of dimension 0, without the others.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    rows: Mapping[str, Callable[[int], Tensor]]


def require_gguf(what: str) -> None:
    """Raises a ConfigError if the package `gguf` is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{what} needs the package gguf, which is not installed: pip install 'leyden[gguf]'"
        )


def read_gguf(path: Path) -> GGUFFile:
    """Opens a file, with all parts if it is one of several; no tensor is read yet.

    Raises:
        ConfigError: If it cannot be read, is cut off or damaged, a part is missing, or it has tensors of a type that is
            none of `PLAIN` and `QUANTISED`.
    """
    require_gguf(str(path))
    one = _read_part(path)
    count = one.metadata.get("split.count")
    return _joined(path, count) if isinstance(count, int) and count > 1 else one


def _read_part(path: Path) -> GGUFFile:
    try:
        with open_inside(path.parent, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, described, start = _Header(content, size).read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as GGUF: {read_error(error)}.") from error
    found: dict[str, LazyTensor] = {}
    rows: dict[str, Callable[[int], Tensor]] = {}
    for name, shape, kind, offset in described:
        found[name], rows[name] = _tensor(path, size, name, shape, kind, start + offset)
    return GGUFFile(path, metadata, found, rows)


def _joined(path: Path, count: int) -> GGUFFile:
    """Returns all parts as one file: the metadata of the first one, the tensors of all."""
    name = PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count or count > MOST_PARTS:
        raise ConfigError(
            f"{path} is one of {count} parts; its name would have to end in -00001-of-{count:05}.gguf or alike."
        )
    paths = [path.with_name(f"{name['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    for one in paths:
        if not one.exists():
            raise ConfigError(f"{one} is missing: {path.name} is one of {count} parts.")
    parts = [_read_part(one) for one in paths]
    tensors: dict[str, LazyTensor] = {}
    rows: dict[str, Callable[[int], Tensor]] = {}
    for number, part in enumerate(parts):
        place = tuple(part.metadata.get(f"split.{key}") for key in ("no", "count"))
        if place != (number, count):
            raise ConfigError(f"{part.path} says that it is part {place[0]} of {place[1]}, counted from 0.")
        if twice := tensors.keys() & part.tensors.keys():
            raise ConfigError(f"{part.path}: {ascii(min(twice))[1:-1][:80]} is in another part, too.")
        tensors |= part.tensors
        rows |= part.rows
    wanted = parts[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ConfigError(
            f"{paths[0]}: its {count} parts have {len(tensors)} tensors, not {wanted} as it says."
        )
    return GGUFFile(path, parts[0].metadata, tensors, rows)


class _Header:
    """The header of a file, read from its beginning.

    Args:
        content: The file.
        size: Size of the file in bytes.
    """

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self.content, self.size, self.place = content, size, 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        """Returns metadata; name, shape, type and offset of each tensor; and where their data begin."""
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        version, tensors, keys = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3 in little-endian order can be read")
        pairs = [(self._string(), self._value(self._scalar("I"))) for _ in self._range(keys, 13)]
        described = [self._described() for _ in self._range(tensors, 25)]
        metadata = dict(pairs)
        for names in ([key for key, _ in pairs], [name for name, *_ in described]):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"it has {ascii(twice[0])[1:-1][:80]} twice")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("general.alignment is no positive number")
        return metadata, described, math.ceil(self.place / alignment) * alignment

    def _take(self, count: int) -> bytes:
        begin, self.place = self.place, self.place + count
        if self.place > self.size:
            raise ValueError("it is cut off")
        if self.place > MOST_BYTES:
            raise ValueError(f"its header has more than {MOST_BYTES >> 20} MiB")
        found: bytes = self.content[begin : self.place]
        return found

    def _range(self, count: int, least: int) -> range:
        """Returns a range of items that take at least so many bytes each, if they fit into the file."""
        if count * least > self.size - self.place:
            raise ValueError("it is cut off")
        return range(count)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))
        return value

    def _string(self) -> str:
        return str(self._take(self._scalar("Q")), "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner == STRING:
                return [self._string() for _ in self._range(count, 8)]
            if inner in SCALARS:
                form = SCALARS[inner]
                width = struct.calcsize("<" + form)
                self._range(count, width)
                return list(struct.unpack(f"<{count}{form}", self._take(count * width)))
            raise ValueError(f"it has a list of type {inner}, which is not known")
        if kind not in SCALARS:
            raise ValueError(f"it has a value of type {kind}, which is not known")
        value = self._scalar(SCALARS[kind])
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._scalar("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{ascii(name)[1:-1][:80]} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        if not all(shape):
            raise ValueError(f"{ascii(name)[1:-1][:80]} has a dimension of 0")
        return name, shape, self._scalar("I"), self._scalar("Q")


def _tensor(
    path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, begin: int
) -> tuple[LazyTensor, Callable[[int], Tensor]]:
    """Returns a tensor, and what reads one of its rows."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    shown = ascii(name)[1:-1][:80]
    known = {int(one): one for one in GGMLQuantizationType}
    label = known[kind].name if kind in known else f"number {kind}"
    if label not in PLAIN and label not in QUANTISED:
        raise ConfigError(
            f"{path}: {shown} is of type {label}; {', '.join([*PLAIN, *QUANTISED])} can be read."
        )
    block, width = GGML_QUANT_SIZES[known[kind]]
    if shape[-1] % block:
        raise ConfigError(f"{path}: {shown} is damaged: its rows are no multiple of {block}.")
    stored = (*shape[:-1], shape[-1] // block * width)
    if begin + math.prod(stored) > size:
        raise ConfigError(f"{path} is cut off: {shown} ends after the end of the file.")
    read = partial(_read, path, begin, shape, stored, known[kind])
    dtype = PLAIN.get(label, torch.float32)
    return LazyTensor(shape, dtype, read), lambda row: _read(
        path, begin + row * math.prod(stored[1:]), shape[1:], stored[1:], known[kind]
    )


def _read(path: Path, begin: int, shape: tuple[int, ...], stored: tuple[int, ...], kind: Any) -> Tensor:
    from gguf import dequantize

    content = np.fromfile(path, np.uint8, math.prod(stored), offset=begin)
    if content.size != math.prod(stored):
        raise ConfigError(f"{path} is cut off: it has become shorter since it was opened.")
    if kind.name in PLAIN:
        return torch.from_numpy(content).view(PLAIN[kind.name]).view(shape)
    return torch.from_numpy(np.ascontiguousarray(dequantize(content.reshape(stored), kind))).view(shape)
