"""Reads documents from folders of text that litdata wrote."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow

from core.technique import technique
from datamodules.preparation.readers.item_chunks import (
    Chunk,
    ChunkedDocuments,
    Layout,
    behind_offsets,
    checked,
    field_of,
)
from toolkit.bounded import parse_json

_ARROW = b"LDARW01\0"
"""End of a chunk that has its items as an Arrow file too; behind that, its size."""

_FRAMED = b"LDFZ01\0\0"
"""Beginning of a chunk whose items are compressed some hundred at a time."""

_HEAD, _FRAME = struct.Struct("<8sHHIII"), struct.Struct("<IIQII")
_LEAF = "str"


@technique(paper="litdata's optimize of texts, github.com/Lightning-AI/litdata")
class LitdataDocuments(ChunkedDocuments):
    """Reads folders that `litdata.optimize` wrote of strings, or of dicts or tuples with a string: one document per item.

    Chunks are plain, hold Arrow tables, as litdata writes of dicts, or are compressed with zstd as a whole (`compression_level="chunk"`) or in
    groups of items ("batch", litdata's default). Other fields of items, such as pickled ones, are not read. A broken chunk is rejected
    with the items behind the damage. For folders of tokens there is `LitdataDataModule`.

    Args:
        source: The folder that has the index.json, such as train/.
        text_field: Key of the text in items that are dicts; its number in tuples, "0" for the first.

    Raises:
        ConfigError: If there is no index, it is damaged, or its items have no such string.

    Example:
        data:
          init_args:
            source: optimized/train
            reader: {class_path: LitdataDocuments, init_args: {text_field: text}}
    """

    writer, suffix = "litdata.optimize", ".bin"

    def chunks_of(self, index: Any) -> list[Chunk]:
        """Returns the chunks that have items."""
        config = index["config"]
        if config.get("encryption") is not None:
            raise ValueError("its chunks are encrypted")
        if any("no_header" in str(kind) for kind in config["data_format"]):
            raise ValueError("it holds tokens, which --config data/litdata reads")
        codec, level = config.get("compression"), config.get("compression_level") or "chunk"
        if codec is not None and (str(codec).partition(":")[0] != "zstd" or level not in ("chunk", "batch")):
            raise ValueError(
                f"its chunks are compressed as {ascii((codec, level))[:60]}; zstd of chunks or batches is read"
            )
        whole = "zstd" if codec is not None and level == "chunk" else None
        layout = self._layout(config)
        chunks = []
        for chunk in index["chunks"]:
            name, size, items = checked(chunk["filename"], chunk["chunk_bytes"], chunk["chunk_size"])
            if items:
                chunks.append(Chunk(name, size, items, whole, layout))
        return chunks

    def _layout(self, config: Any) -> Layout:
        """Returns where the text is among the leaves of an item."""
        kinds = config["data_format"]
        [_, spec] = parse_json(config["data_spec"].encode())
        children = spec["children_spec"]
        leaf = 0
        if children:
            dictionary = spec["type"] == "builtins.dict"
            names = parse_json(spec["context"].encode()) if dictionary else map(str, range(len(children)))
            place = field_of(names, self.text_field)
            leaf = sum(map(_leaves, children[:place]))
            if children[place]["children_spec"]:
                raise ValueError(f"{self.text_field!r} is no string in its items")
        if kinds[leaf] != _LEAF:
            raise ValueError(f"{self.text_field!r} is {ascii(kinds[leaf])[:40]} in its items, not a string")
        return Layout([None] * len(kinds), leaf)

    def items(self, raw: memoryview, chunk: Chunk) -> Iterator[bytes]:
        """Yields the text of each item of a chunk."""
        if raw[: len(_FRAMED)] == _FRAMED:
            for item in _in_frames(raw, chunk.items):
                yield chunk.layout.text(item)
        elif raw[-len(_ARROW) :] == _ARROW and not any(map(len, behind_offsets(raw, chunk.items))):
            yield from self._in_table(raw, chunk.items)
        else:
            yield from super().items(raw, chunk)

    def _in_table(self, raw: memoryview, count: int) -> Iterator[bytes]:
        end = len(raw) - len(_ARROW) - 4
        size = int.from_bytes(raw[end : end + 4], "little")
        if size > end:
            raise ValueError("its table is larger than the chunk")
        reader = pyarrow.ipc.open_file(pyarrow.py_buffer(raw[end - size : end]))
        found = 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            column = batch.column(field_of(batch.schema.names, self.text_field))
            found += len(column)
            yield from (value or b"" for value in column.cast(pyarrow.large_binary()).to_pylist())
        if found != count:
            raise ValueError(f"its table has {found:,} rows, index.json says {count:,}")


def _leaves(spec: Any) -> int:
    return sum(map(_leaves, spec["children_spec"])) if spec["children_spec"] else 1


def _in_frames(raw: memoryview, count: int) -> Iterator[memoryview]:
    """Yields the items of a chunk that is compressed in frames.

    It has a head, the offset of each item and of the end in their whole content, a table of frames, and the frames.
    """
    if len(raw) < _HEAD.size:
        raise ValueError("it ends within its header")
    _, version, _, items, _, frames = _HEAD.unpack_from(raw)
    table = _HEAD.size + 4 * (items + 1)
    if version != 1 or items != count or len(raw) < table + frames * _FRAME.size:
        raise ValueError(f"its header, of version {version} and {items:,} items, does not fit the chunk")
    offsets = struct.unpack_from(f"<{items + 1}I", raw, _HEAD.size)
    following = 0
    for frame in range(frames):
        first, number, at, packed, size = _FRAME.unpack_from(raw, table + frame * _FRAME.size)
        inside = offsets[first : first + number + 1]
        if first != following or len(inside) <= number or at + packed > len(raw):
            raise ValueError(f"frame {frame} does not fit the chunk")
        if inside[-1] - inside[0] != size or any(end < begin for begin, end in pairwise(inside)):
            raise ValueError(f"frame {frame} does not fit its items")
        following = first + number
        content = memoryview(pyarrow.Codec("zstd").decompress(raw[at : at + packed], size))
        for begin, end in pairwise(inside):
            yield content[begin - inside[0] : end - inside[0]]
    if following != items:
        raise ValueError(f"its frames have {following:,} of {items:,} items")
