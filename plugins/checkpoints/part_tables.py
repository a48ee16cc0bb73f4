"""Where the parts of a sharded checkpoint's tensors are: one table of all tensors, and a small one for each rank's parts.

`tensors.json` has data type and shape of each tensor by name. `__0.parts`, `__1.parts`... list the parts that a rank holds,
also those that another rank wrote for both. They are 64-bit integers, little-endian: the number D of dimensions, then
rows, in the order of their keys:

  key           the first bytes of a hash of the tensor's name
  writer        number of the rank in whose file it is
  start, length the bytes of that file; 0 if another rank wrote it, whose table says so
  D offsets     of the part in the tensor; 0 in dimensions that the tensor lacks
  D sizes       of the part; 1 in dimensions that the tensor lacks

A rank that resumes with the shards that it had finds all of them in its own table, and in those of the ranks that wrote
for it. Otherwise it reads the tables of other ranks, likely ones first, until all that it needs is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from plugins.checkpoints.checked_files import Damage, Files
from plugins.checkpoints.whole_description import without_collector
from toolkit.bounded import parse_json

TENSORS, DATA, PARTS = "tensors.json", ".distcp", ".parts"
"""The table of all tensors; how names of data files and of tables end."""

KEY, WRITER, START, LENGTH, FIXED = range(5)
MOST_DIMENSIONS, MOST_NUMBER = 64, 2**61

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """A part of a tensor that a rank holds.

    Attributes:
        name: The tensor.
        offsets: Its first element's place in the tensor.
        sizes: Its shape.
        writer: Number of the rank in whose file it is.
        start: Its first byte in the file; 0 if another rank wrote it.
        length: Its bytes in the file.
    """

    name: str
    offsets: Sequence[int]
    sizes: Sequence[int]
    writer: int
    start: int = 0
    length: int = 0


class Block(NamedTuple):
    """Rows of tables in the order of their keys, and these keys."""

    keys: Numbers
    rows: Numbers


def data_file(number: int) -> str:
    """Returns the name of the file in which a rank writes its parts."""
    return f"__{number}_0{DATA}"


def table_file(number: int) -> str:
    """Returns the name of a rank's table."""
    return f"__{number}{PARTS}"


def hashed(text: str) -> int:
    """Returns 64 bits of a hash, as a signed number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def table(parts: Sequence[Part]) -> bytes:
    """Returns the content of a rank's table."""
    dimensions = max((len(part.sizes) for part in parts), default=0)
    rows = np.empty((len(parts), FIXED + 2 * dimensions), "<i8")
    for row, part in zip(rows, parts, strict=True):
        lacks = dimensions - len(part.sizes)
        places = [*part.offsets, *[0] * lacks, *part.sizes, *[1] * lacks]
        row[:] = [hashed(part.name), part.writer, part.start, part.length, *places]
    return np.array([dimensions], "<i8").tobytes() + rows[np.argsort(rows[:, KEY], kind="stable")].tobytes()


def tensor_table(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> bytes:
    """Returns the content of the table of all tensors."""
    entries = {
        name: [str(dtype).removeprefix("torch."), list(size)] for name, (size, dtype) in tensors.items()
    }
    return json.dumps(entries, separators=(",", ":")).encode()


class PartTables:
    """The tables of a checkpoint; those of ranks are read as they are needed.

    Args:
        content: The table of all tensors.
        files: Size of each file of the checkpoint.
        read: Returns the content of a file.

    Attributes:
        tensors: Name -> shape and data type.

    Raises:
        Damage: If the table is none.
    """

    def __init__(self, content: bytes, files: Files, read: Callable[[str], bytes]) -> None:
        self.tensors = dict(_entries(content))
        self._files, self._read = files, read
        self._count = sum(name.endswith(PARTS) for name in files)
        self._dimensions = max((len(size) for size, _ in self.tensors.values()), default=0)
        self._blocks: dict[int, Block] = {}

    def parts_for(self, targets: Mapping[str, Tensor]) -> Any:
        """Returns DCP's `Metadata` for reading tensors, or this rank's shards of DTensors.

        Args:
            targets: Name -> tensor to read into.

        Raises:
            Damage: If parts are missing, or a table is damaged.
        """
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        known = {name: target for name, target in targets.items() if name in self.tensors}
        chunks = [
            (item.index.fqn, item.tensor_data) for item in create_default_local_save_plan(known, False).items
        ]
        wanted = [
            Part(name, data.chunk.offsets, data.chunk.sizes, -1)
            for name, data in chunks
            if data is not None and data.size == self.tensors[name][0]  # of others DCP says it
        ]
        entries = {
            name: dcp.TensorStorageMetadata(
                dcp.TensorProperties(self.tensors[name][1]), self.tensors[name][0], []
            )
            for name in known
        }
        places: dict[dcp.MetadataIndex, Any] = {}
        with without_collector():
            for part in self._found(wanted):
                chunk = dcp.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                entries[part.name].chunks.append(chunk)
                place = _StorageInfo(data_file(part.writer), part.start, part.length)
                places[dcp.MetadataIndex(part.name, chunk.offsets)] = place
        return dcp.Metadata(dict(entries), storage_data=places, storage_meta=dcp.StorageMeta())

    def _found(self, wanted: Sequence[Part]) -> Iterator[Part]:
        """Yields the stored parts that overlap with wanted ones."""
        search = _Search(self.tensors, wanted, self._dimensions)
        names = {hashed(part.name): part.name for part in wanted}
        for block in self._nearest(search):
            for row in search.overlaps(block).tolist():
                key, writer, start, length, *places = row
                name = names[key]
                size = len(self.tensors[name][0])
                if start + length > self._files.get(data_file(writer), {}).get("bytes", -1):
                    raise Damage(f"{table_file(writer)} names bytes that {data_file(writer)} does not have")
                offsets, sizes = places[:size], places[self._dimensions :][:size]
                yield Part(name, offsets, sizes, writer, start, length)
            if search.missing is None:
                break
        if (missing := search.missing) is not None:
            raise Damage(f"parts of {missing} are in none of its tables")

    def _nearest(self, search: _Search) -> Iterator[Block]:
        """Yields the rows of tables: of the own one and those it refers to, of likely ones, then of ranks of a like share."""
        if self._count == len(self._blocks) > 1:
            self._blocks = {0: _merged(list(self._blocks.values()))}
            self._count = 1
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        waiting = sorted(range(self._count), key=lambda n: abs(n * ranks - rank * self._count), reverse=True)
        waiting += [*search.likely(self._count), *range(rank, min(rank + 1, self._count))]
        done: set[int] = set()
        while waiting:
            if (number := waiting.pop()) not in done:
                done.add(number)
                if number not in self._blocks:
                    self._blocks[number] = self._block(number)
                yield self._blocks[number]
                waiting += search.referred

    def _block(self, number: int) -> Block:
        name = table_file(number)
        try:
            return _parsed(self._read(name), number, self._dimensions)
        except ValueError as error:
            raise Damage(f"{name} is no table of parts: {error}") from error


def _entries(content: bytes) -> Iterator[tuple[str, tuple[torch.Size, torch.dtype]]]:
    entries = parse_json(content)
    if not isinstance(entries, dict):
        raise Damage(f"{TENSORS} is no table of tensors")
    for name, (kind, size) in entries.items():
        dtype = getattr(torch, kind, None)
        fits = len(size) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n < MOST_NUMBER for n in size)
        if not isinstance(dtype, torch.dtype) or not fits:
            raise Damage(f"{TENSORS}: {name[:100]!r} is no tensor of {str(kind)[:100]!r}")
        yield name, (torch.Size(size), dtype)


def _parsed(content: bytes, number: int, dimensions: int) -> Block:
    """Returns the rows of a rank's table, with as many dimensions as the tensors of all ranks have at most."""
    values = np.frombuffer(content, "<i8")
    own = int(values[0]) if len(values) else -1
    if not 0 <= own <= dimensions:
        raise ValueError(f"it has {own} dimensions, the tensors {dimensions}")
    found = values[1:].reshape(-1, FIXED + 2 * own).astype(np.int64, copy=False)
    rows = np.zeros((len(found), FIXED + 2 * dimensions), np.int64)
    sizes = FIXED + dimensions
    rows[:, : FIXED + own], rows[:, sizes : sizes + own] = found[:, : FIXED + own], found[:, FIXED + own :]
    rows[:, sizes + own :] = 1
    keys, rest = np.ascontiguousarray(rows[:, KEY]), rows[:, WRITER:]
    if len(rows) and not (rest.min() >= 0 and rest.max() < MOST_NUMBER and (keys[1:] >= keys[:-1]).all()):
        raise ValueError("a number is out of range")
    if (rows[rows[:, LENGTH] > 0, WRITER] != number).any():
        raise ValueError("it places parts in the file of another rank")
    return Block(keys, rows)


def _merged(blocks: list[Block]) -> Block:
    """Returns the rows of all tables that say where parts are: one search is faster than thousands."""
    rows = np.concatenate([rows[rows[:, LENGTH] > 0] for _, rows in blocks])
    rows = rows[np.argsort(rows[:, KEY], kind="stable")]
    return Block(np.ascontiguousarray(rows[:, KEY]), rows)


class _Search:
    """What is wanted, and how much of it was not found yet.

    Args:
        tensors: Name -> shape and data type.
        wanted: Parts of them that are to be read.
        dimensions: Most dimensions of a tensor.

    Attributes:
        referred: Ranks that wrote parts which the last block lists, but does not place.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
        wanted: Sequence[Part],
        dimensions: int,
    ) -> None:
        def numbers(values: Iterator[Sequence[int]], lacking: int) -> Numbers:
            rows = [[*value, *[lacking] * (dimensions - len(value))] for value in values]
            return np.array(rows, np.int64).reshape(len(wanted), dimensions)

        self._wanted = wanted
        self._keys = np.array([hashed(part.name) for part in wanted], np.int64)
        self._low = numbers((part.offsets for part in wanted), 0)
        self._high = self._low + numbers((part.sizes for part in wanted), 1)
        self._shape = numbers((tensors[part.name][0] for part in wanted), 1)
        self._left = (self._high - self._low).prod(1)
        self.referred: list[int] = []

    @property
    def missing(self) -> str | None:
        """A tensor of which parts were not found; None: there is none."""
        left = np.flatnonzero(self._left > 0)
        return self._wanted[left[0]].name if len(left) else None

    def likely(self, ranks: int) -> list[int]:
        """Returns the ranks that have what is wanted if so many have cut tensors by their rows, as FSDP does."""
        if not self._low.size or not ranks:
            return []
        rows = np.maximum(-(-self._shape[:, 0] // ranks), 1)
        first, last = self._low[:, 0] // rows, (self._high[:, 0] - 1) // rows
        marks = np.zeros(ranks + 1, np.int64)
        np.add.at(marks, first.clip(0, ranks), 1)
        np.add.at(marks, (last + 1).clip(0, ranks), -1)
        return np.flatnonzero(np.cumsum(marks)[:ranks] > 0).tolist()

    def overlaps(self, block: Block) -> Numbers:
        """Returns the rows of a block that say where something wanted is."""
        first = np.searchsorted(block.keys, self._keys, "left")
        counts = np.searchsorted(block.keys, self._keys, "right") - first
        which = np.repeat(np.arange(len(counts)), counts)
        rows = block.rows[np.arange(len(which)) + np.repeat(first - (np.cumsum(counts) - counts), counts)]
        dimensions = self._low.shape[1]
        low, size = rows[:, FIXED : FIXED + dimensions], rows[:, FIXED + dimensions :]
        if (low + size > self._shape[which]).any():
            raise Damage(f"a table of parts names one outside of {self._wanted[which[0]].name}")
        volumes = np.minimum(low + size, self._high[which]) - np.maximum(low, self._low[which])
        shared = volumes.clip(0).prod(1)
        placed = rows[:, LENGTH] > 0
        np.subtract.at(self._left, which[placed], shared[placed])
        self.referred = np.unique(rows[(shared > 0) & ~placed, WRITER]).tolist()
        return rows[(shared > 0) & placed]
