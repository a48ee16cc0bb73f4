"""Reads and validates the index.json of a folder of litdata chunks, and the header of a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.bounded import parse_json, plain_path, read_inside
from toolkit.prepared import MANIFEST

INDEX = "index.json"
DTYPES = {
    "no_header_numpy:5": "uint16",
    "no_header_numpy:6": "uint32",
    "no_header_numpy:2": "uint32",
    "no_header_numpy:3": "int64",
    "no_header_tensor:15": "uint32",
    "no_header_tensor:16": "uint32",
    "no_header_tensor:17": "int64",
    "no_header_tensor:18": "int64",
    "no_header_tensor:20": "uint16",
}
"""litdata's names of the token types -> the numpy types that they are read as. int32 is read as uint32: a negative id is then
larger than any vocabulary, and refused as such."""

_MOST = 1 << 32
"""Most bytes of a chunk: the offsets in it are uint32."""


@dataclass(frozen=True)
class TokenIndex:
    """The content of index.json.

    A chunk is a header of uint32 (number of items; byte offset of each item and of the end), then the items'
    tokens. An item is a document.

    Args:
        dtype: Data type of a token.
        names: File name of each chunk.
        sizes: Bytes of each chunk.
        items: Documents in each chunk.
        compressed: Whether the files of chunks are compressed with zstd; `sizes` are those of their content.
    """

    dtype: np.dtype
    names: tuple[str, ...]
    sizes: np.ndarray
    items: np.ndarray
    compressed: bool = False

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens in each chunk, int64."""
        return (self.sizes - header_bytes(self.items)) // self.dtype.itemsize

    def between(self, first: int, stop: int) -> tuple[TokenIndex, int, int]:
        """Returns the index of the chunks that hold the tokens at positions [first, stop); number and begin of the first one."""
        ends = np.cumsum(self.tokens)
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends - self.tokens, stop, side="left"))
        part = slice(low, high)
        index = TokenIndex(self.dtype, self.names[part], self.sizes[part], self.items[part], self.compressed)
        return index, low, int(ends[low] - self.tokens[low])


def within(folder: Path, name: str) -> tuple[Path, str]:
    """Returns the folder that a file must not lead out of, the prepared one if there is one, and the path in it."""
    if (folder.parent / MANIFEST).exists():
        return folder.parent, f"{folder.name}/{name}"
    return folder, name


def header_bytes(items: Any) -> Any:
    """Returns the bytes of the header of a chunk with a number of items."""
    return 4 * (items + 2)


def read_index(folder: Path) -> TokenIndex:
    """Returns the index of a folder of chunks.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not an index, or inconsistent: a file outside the folder, two chunks of one name, or
            sizes too small for the documents.
    """
    return parsed_index(read_inside(*within(folder, INDEX)))


def parsed_index(content: bytes) -> TokenIndex:
    """Returns what an index.json says; raises a ValueError as :func:`read_index` does."""
    index = parse_json(content)
    dtype = np.dtype(_dtype(index))
    chunks = index.get("chunks")
    if not isinstance(chunks, list) or not chunks:
        raise ValueError("it lists no chunks")
    found = [_chunk(number, chunk, dtype.itemsize) for number, chunk in enumerate(chunks)]
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it lists the chunk {twice} twice")
    sizes, items = (np.array(column, np.int64) for column in ([f[1] for f in found], [f[2] for f in found]))
    return TokenIndex(dtype, tuple(names), sizes, items, _compressed(index["config"]))


def _compressed(config: Mapping[str, Any]) -> bool:
    """Returns whether each chunk is compressed as a whole; ValueError if it is stored in yet another way."""
    if config.get("encryption") is not None:
        raise ValueError("its chunks are encrypted")
    codec, level = config.get("compression"), config.get("compression_level")
    if codec is None:
        return False
    if not isinstance(codec, str) or codec.partition(":")[0] != "zstd" or level not in (None, "chunk"):
        raise ValueError(
            f"its chunks are compressed as {ascii(codec)[:40]}, {ascii(level)[:40]}; zstd of chunks is read"
        )
    return True


def _dtype(index: Any) -> str:
    config = index.get("config") if isinstance(index, Mapping) else None
    formats = config.get("data_format") if isinstance(config, Mapping) else None
    if not isinstance(formats, list) or len(formats) != 1:
        raise ValueError("it does not say its config's data_format")
    if not isinstance(formats[0], str) or formats[0] not in DTYPES:
        raise ValueError(f"its data_format is {ascii(formats[0])[:60]}, not token ids of 16, 32 or 64 bits")
    return DTYPES[formats[0]]


def _chunk(number: int, chunk: Any, itemsize: int) -> tuple[str, int, int]:
    """Returns file name, bytes and documents of a chunk."""
    if not isinstance(chunk, Mapping):
        raise ValueError(f"chunk {number} is no object")
    name = chunk.get("filename")
    if not isinstance(name, str) or not plain_path(name) or "/" in name:
        raise ValueError(f"chunk {number} has the file name {ascii(name)[:80]}; it is no name in the folder")
    size, items = (_size(chunk, key, name) for key in ("chunk_bytes", "chunk_size"))
    room = size - header_bytes(items)
    if room < itemsize or room % itemsize:
        raise ValueError(f"{name} has {size:,} bytes, which do not hold {items:,} documents")
    return name, size, items


def _size(chunk: Mapping[str, Any], key: str, name: str) -> int:
    value = chunk.get(key)
    if type(value) is not int or not 1 <= value < _MOST:
        raise ValueError(f"{key} of {name} is {ascii(value)[:60]}")
    return value


def read_header(raw: np.ndarray, size: int, items: int) -> np.ndarray:
    """Returns the byte offsets of a chunk's documents and of its end, uint32; checks only the first and last.

    Args:
        raw: The chunk's first bytes.
        size: Bytes of the chunk.
        items: Documents in it.

    Raises:
        ValueError: If the header does not match the number of documents or of bytes.
    """
    header = np.asarray(raw[: header_bytes(items)])
    if header.nbytes != header_bytes(items):
        raise ValueError(f"it is too short for the header of {items:,} items")
    header = header.view(np.uint32)
    if (header[0], header[1], header[-1]) != (items, header.nbytes, size):
        raise ValueError(f"its header does not describe {items} items in {size:,} bytes")
    return header[1:]


def checked_header(raw: np.ndarray, size: int, items: int, itemsize: int) -> np.ndarray:
    """Returns the offsets of :func:`read_header` after checking all of them; `itemsize` is the bytes of a token.

    Raises:
        ValueError: Also if the offsets do not increase by multiples of a token's size.
    """
    offsets = read_header(raw, size, items)
    if (offsets[1:] < offsets[:-1]).any():  # equal ones: litdata stores documents without tokens
        raise ValueError("the offsets of its documents do not rise")
    if ((offsets - offsets[0]) % itemsize).any():
        raise ValueError("the offsets of its documents are inside a token")
    return offsets
