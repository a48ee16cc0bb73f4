"""The two files of a rank in a sharded checkpoint: the parts of tensors that it writes, and the table of those it holds."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from core import durable
from plugins.checkpoints.atomic_checkpoint import system_error
from plugins.checkpoints.checked_files import sums_of
from plugins.checkpoints.hashed_files import HashedFiles
from plugins.checkpoints.part_tables import Numbers, Part, hashed, table, table_file
from plugins.checkpoints.patience import no_room


class RankFiles:
    """What a rank holds, and how it is written.

    Args:
        tensors: Tensors, or DTensors of which this rank has a shard, by their keys.
        read: Returns the tensor of a key when its turn has come; `tensors` may be on the meta device then.
    """

    def __init__(self, tensors: dict[str, Tensor], read: Callable[[str], Tensor] | None = None) -> None:
        self._planner = _Planner(read)
        self._planner.set_up_planner(tensors, is_coordinator=True)
        self._plan = self._planner.create_local_plan()
        self._later = read is not None

    def tensors(self, known: Container[str] = ()) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Returns shape and data type of each tensor, by name; those that are known are left out."""
        data = (
            (item.index.fqn, item.tensor_data) for item in self._plan.items if item.index.fqn not in known
        )
        return {name: (found.size, found.properties.dtype) for name, found in data if found is not None}

    def shared(self, ranks: int) -> tuple[list[int], Numbers]:
        """Returns which of the parts other ranks may hold, too, and for each of them a hash of what it is and its elements.

        Args:
            ranks: How many ranks write.
        """
        numbers = [
            number
            for number, item in enumerate(self._plan.items)
            if not _held_alone(self._planner.state_dict[item.index.fqn], ranks)
        ]
        items = (self._plan.items[number] for number in numbers)
        rows = [
            (hashed(f"{item.index.fqn} {tuple(item.index.offset or ())}"), _sizes(item).numel())
            for item in items
        ]
        return numbers, np.array(rows, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self._plan.items)

    def elements(self, rank: int, writers: Sequence[int]) -> int:
        """Returns how many elements a rank writes."""
        return sum(
            _sizes(item).numel()
            for item, writer in zip(self._plan.items, writers, strict=True)
            if writer == rank
        )

    def write(self, folder: Path, rank: int, writers: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Writes and flushes the files of this rank; returns size and SHA-256 of what was written, by their names.

        Args:
            folder: The checkpoint.
            rank: This rank's number.
            writers: The rank that writes each part.

        Raises:
            OSError: If they cannot be written.
        """
        items = self._plan.items
        own = [item for item, writer in zip(items, writers, strict=True) if writer == rank]
        places, sums = self._write_data(folder, rank, replace(self._plan, items=own))
        parts = []
        for item, writer in zip(items, writers, strict=True):
            place = places.get(item.index) if writer == rank else None
            bytes_of = (place.offset, place.length) if place else (0, 0)
            parts.append(
                Part(item.index.fqn, tuple(item.index.offset or ()), _sizes(item), writer, *bytes_of)
            )
        content = table(parts)
        (folder / table_file(rank)).write_bytes(content)
        durable.sync(folder / table_file(rank))
        return {table_file(rank): sums_of(len(content), hashlib.sha256(content)), **sums}

    def _write_data(
        self, folder: Path, rank: int, plan: dcp.SavePlan
    ) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Returns where each part is, and checksums of the files."""
        if self._later:
            _return_memory()
        writer = dcp.FileSystemWriter(folder)
        writer.fs = files = HashedFiles()
        if self._later:  # with a GPU in reach, the writer would ask for tensors ahead of those that it writes
            writer.per_thread_copy_ahead = 0
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        plan = self._planner.finish_plan(writer.prepare_local_plan(plan))
        try:
            results = writer.write_data(plan, self._planner).value()
        except (OSError, RuntimeError) as error:  # so that the other ranks learn the cause
            raise OSError(errno.ENOSPC if no_room(error) else errno.EIO, system_error(error)) from error
        return {result.index: result.storage_data for result in results}, files.sums


class _Planner(dcp.DefaultSavePlanner):
    def __init__(self, read: Callable[[str], Tensor] | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read
        self._last: Tensor | None = None

    def lookup_object(self, index: Any) -> Any:
        if self._read is None:
            return super().lookup_object(index)
        # The writer asks for a tensor when it has written the one before, but keeps all of them to the end.
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = self._read(index.fqn)
        if not self._last.untyped_storage().resizable():  # numpy's memory, or pages of a file
            self._last = self._last.clone()
        return self._last


def _held_alone(tensor: Any, ranks: int) -> bool:
    """Returns whether a tensor is sharded over all ranks: each has parts of its own."""
    if not isinstance(tensor, DTensor):
        return ranks == 1
    mesh = tensor.device_mesh
    sizes = zip(tensor.placements, mesh.shape, strict=True)
    return mesh.size() == ranks and not any(
        placement.is_replicate() and size > 1 for placement, size in sizes
    )


def _sizes(item: Any) -> torch.Size:
    sizes: torch.Size = item.tensor_data.chunk.sizes
    return sizes


def _return_memory() -> None:
    """Has the C library take large tensors from the system and give them back: its heap would keep their holes.

    See mallopt(3): glibc raises M_MMAP_THRESHOLD, here set to 1 MiB, to the size of what is freed.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None:
        mallopt(-3, 2**20)
