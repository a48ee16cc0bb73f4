"""Reads folders of chunks whose items lie behind a table of their offsets, as litdata and MosaicML's MDS have them."""

from __future__ import annotations

import io
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from core.contracts import Reject
from core.errors import ConfigError, nearest
from datamodules.preparation.readers.file_reader import FileReader, Row
from datamodules.preparation.readers.opened_files import LONGEST, printable
from datamodules.preparation.readers.source_files import Piece, SourceFiles, require_files_here, whole_files
from toolkit.bounded import open_inside, parse_json, plain_path, read_error, read_inside

INDEX = "index.json"
_MOST = 1 << 32
"""Most bytes of a chunk: offsets are uint32."""

_BLOCK = 1 << 20


class Layout(NamedTuple):
    """Where the text is in an item: first the sizes of its fields, uint32, then the fields.

    Attributes:
        sizes: Bytes of each field; None: the item says it.
        field: Number of the field with the text.
    """

    sizes: Sequence[int | None]
    field: int

    def text(self, item: memoryview) -> bytes:
        """Returns the text in an item; ValueError if the item is shorter than it says."""
        count = sum(size is None for size in self.sizes)
        if len(item) < 4 * count:
            raise ValueError("an item is shorter than its table of sizes")
        own = iter(struct.unpack_from(f"<{count}I", item))
        sizes = [next(own) if size is None else size for size in self.sizes]
        begin = 4 * count + sum(sizes[: self.field])
        if begin + sizes[self.field] > len(item):
            raise ValueError("a field of an item is longer than the item")
        return bytes(item[begin : begin + sizes[self.field]])


class Chunk(NamedTuple):
    """A file of items.

    Attributes:
        name: Its path in the folder.
        size: Bytes of its content, decompressed.
        items: Number of its items.
        codec: What pyarrow calls the compression of the whole file; None: it is not compressed.
        layout: Where the text is in each item.
    """

    name: str
    size: int
    items: int
    codec: str | None
    layout: Layout


class ChunkedDocuments(FileReader):
    """A reader of such a folder. A subclass reads its index.

    Args:
        source: The folder, which holds index.json.
        text_field: Field of the text.

    Attributes:
        writer: What writes such folders, for messages.
        suffix: Ending of the names of chunks.
    """

    writer: str
    suffix: str

    def __init__(self, source: str, text_field: str = "text") -> None:
        require_files_here(source)
        self.folder, self.text_field = Path(source).expanduser(), text_field
        try:
            chunks = self.chunks_of(parse_json(read_inside(self.folder, INDEX)))
            if not chunks:
                raise ValueError("it lists no items")
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            what = read_error(error) if isinstance(error, OSError | ValueError) else f"no index, {error!r}"
            splits = ", ".join(sorted(str(path.parent) for path in self.folder.glob(f"*/{INDEX}"))[:5])
            hint = f"\nName one of its folders: {splits}." if splits else ""
            raise ConfigError(
                f"data.source={source}: {self.folder / INDEX} is missing or damaged: {what}.\n{self.writer} writes such folders.{hint}"
            ) from error
        self._chunks = {chunk.name: chunk for chunk in chunks}
        self.files = SourceFiles(str(self.folder), (self.suffix, f"{self.suffix}.zstd", f"{self.suffix}.gz"))
        self.files.restrict([self.folder / name for name in self._chunks])

    @abstractmethod
    def chunks_of(self, index: Any) -> list[Chunk]:
        """Returns the chunks that an index lists, in their order; ValueError, TypeError or KeyError if it is damaged."""

    def options(self) -> dict[str, Any]:
        """Returns the name of the field."""
        return {"text_field": self.text_field}

    def tasks(self) -> list[dict[str, Any]]:
        """Returns groups of chunks."""
        return self.files.tasks(whole_files)

    def rows(self, piece: Piece, reject: Reject) -> Iterator[Row]:
        """Yields the documents of a chunk."""
        path = Path(piece["path"])
        name = path.relative_to(self.folder).as_posix()
        source = printable(path.parent.name)
        try:
            with content(self.folder, self._chunks[name]) as raw:
                for number, found in enumerate(self.items(raw, self._chunks[name])):
                    place = f"{path}, item {number}"
                    if len(found) > LONGEST:
                        reject(source, place, f"an item of more than {LONGEST >> 20} MiB", "")
                        continue
                    try:
                        text = found.decode()
                    except UnicodeDecodeError as error:
                        reject(source, place, "not UTF-8", str(error))
                        continue
                    yield text, source, f"{name}:{number}"
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            details = str(error).partition("\n")[0]
            reject(source, str(path), "broken chunk", details, piece["bytes"])

    def items(self, raw: memoryview, chunk: Chunk) -> Iterator[bytes]:
        """Yields the text of each item of a chunk, as UTF-8."""
        for item in behind_offsets(raw, chunk.items):
            yield chunk.layout.text(item)


def behind_offsets(raw: memoryview, count: int) -> Iterator[memoryview]:
    """Yields the items of a chunk: uint32 number of items, offset of each and of the end, and later the items.

    Raises:
        ValueError: If it has another number of items, or its offsets are not within it.
    """
    begin = 4 * (count + 2)
    if len(raw) < begin:
        raise ValueError(f"it has {len(raw):,} bytes, too few for the offsets of {count:,} items")
    if (found := int.from_bytes(raw[:4], "little")) != count:
        raise ValueError(f"it has {found:,} items, {INDEX} says {count:,}")
    offsets = np.frombuffer(raw[4:begin], "<u4")
    if offsets[0] < begin or offsets[-1] > len(raw) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("its offsets do not rise from its header to its end")
    for first, stop in pairwise(offsets.tolist()):
        yield raw[first:stop]


@contextmanager
def content(folder: Path, chunk: Chunk) -> Iterator[memoryview]:
    """Maps a chunk, or decompresses it into memory.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file within the folder, or has not the size that the index says.
    """
    with open_inside(folder, chunk.name) as stream:
        found: Any
        if chunk.codec is not None:
            found = io.BytesIO()
            reader = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), chunk.codec)
            while found.tell() <= chunk.size and (block := reader.read(_BLOCK)):
                found.write(block)
            found = found.getbuffer()
        else:
            size = stream.seek(0, io.SEEK_END)
            found = np.memmap(stream, np.uint8, mode="r") if size else b""  # type: ignore[call-overload]
        raw = memoryview(found)
        if len(raw) != chunk.size:
            more = "more than" if len(raw) > chunk.size else f"{len(raw):,} bytes, not"
            raise ValueError(f"it has {more} the {chunk.size:,} that {INDEX} says")
        yield raw


def checked(name: Any, size: Any, items: Any) -> tuple[str, int, int]:
    """Returns name, bytes and number of items of a chunk as an index gives them; ValueError if they cannot be right."""
    if not plain_path(name):
        raise ValueError(f"{ascii(name)[:80]} is no path inside the folder")
    for number in (size, items):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST:
            raise ValueError(f"{name} has {ascii(number)[:40]} bytes or items")
    return name, size, items


def field_of(names: Iterable[str], wanted: str) -> int:
    """Returns the place of the text among the fields of an item.

    Raises:
        ValueError: If it is not among them.
    """
    known = list(names)
    if wanted not in known:
        hint = nearest(wanted, set(known))
        raise ValueError(f"items have no field {wanted!r}.{hint} They have {', '.join(known)[:200]}")
    return known.index(wanted)
