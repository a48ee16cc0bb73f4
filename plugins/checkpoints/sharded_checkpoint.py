"""Sharded checkpoints: each rank writes its own shards, while training continues."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map

from core.technique import technique
from plugins.checkpoints import sharded_form
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.shard_writing import connect, write
from plugins.checkpoints.uploads import folder_of
from toolkit.local_paths import is_url
from toolkit.ranks import lazy_group


@technique(
    paper="torch.distributed.checkpoint; snapshot, then write in the background: CheckFreq, FAST 2021, section 4",
    offers=("sharded_checkpoints",),
)
class ShardedCheckpoint(AtomicCheckpoint):
    """Each rank writes its own shards of a checkpoint into one folder, while training continues.

    A run can resume from it with any strategy on any number of ranks; all ranks need the same disk, or a URL of object
    storage to which each uploads its own. A folder is either complete or absent, contains checksums, and is read without running code. `consolidate` converts it to a
    single file. Under strategies that replicate the model (one process, `DDP`), rank 0 writes.

    Args:
        asynchronous: Whether training continues as soon as tensors are copied to the host. This takes as much host
            memory as a rank's shards. The next checkpoint waits for the previous one.

    Attributes:
        stall_s: Seconds for which the last checkpoint blocked training.

    Raises:
        ConfigError: If a checkpoint could not be written; in the background, it is raised when the next one begins
            or the run ends.

    Example:
        trainer:
          plugins+:
            - class_path: ShardedCheckpoint   # in the place of AtomicCheckpoint
    """

    def __init__(self, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous
        self.stall_s = 0.0
        self._stalls: list[float] = []
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint of a replicated model; called on rank 0."""
        self._begin(checkpoint, str(path), None)

    def connect(self) -> None:
        """Makes a process group for the background thread, whose messages must not mix with those of training.

        Called on every rank as the run starts: the others would not notice a rank that dies meanwhile.
        """
        self._group = lazy_group(connect)

    def save_parts(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Writes this rank's shards of a checkpoint; called on every rank."""
        self._begin(checkpoint, str(path), self._group)

    def _begin(self, checkpoint: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
        start = time.perf_counter()
        self._background.wait()
        place, remote = Path(path), None
        task: tuple[Any, ...] = (write,)
        if is_url(path):
            folder, key = folder_of(path, self._background.patience.ending)
            place, remote = self._staging.path_of(key), None if self._staging.failure else folder
            task = (self._staging.attempt, folder, write)
        tensors, rest = sharded_form.split(checkpoint)
        if self.asynchronous:
            tensors, rest = self._snapshot(tensors), tree_map(_copied, rest)
        # A thread in both cases: Ctrl-C is raised in the main thread only, not inside torch's writer.
        self._background.submit(*task, place, tensors, rest, group, self._background.patience, remote)
        if not self.asynchronous or (is_url(path) and remote is None):  # the run ends, and says what is here
            self._background.wait()
        self.stall_s = time.perf_counter() - start
        self._stalls.append(self.stall_s)

    def _snapshot(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if self._stager is None:  # its memory is used again for the next checkpoint
            self._stager = _stager()
        copied: Any
        try:
            copied = self._stager.stage(tensors)
        except KeyError:  # torch 2.11 clears the stager after its first use
            self._stager = _stager()
            copied = self._stager.stage(tensors)
        return dict(copied)

    def teardown(self) -> None:
        """Waits at the end of the run, also after an error; prints how long checkpoints blocked training."""
        super().teardown()
        if self._stalls and (not dist.is_initialized() or dist.get_rank() == 0):
            most, total = max(self._stalls) * 1e3, sum(self._stalls) * 1e3
            times = f"{most:,.1f} ms at most, {total:,.1f} ms in all ({len(self._stalls)} written)"
            print(f"Checkpoints interrupted training for {times}.", flush=True)
        self._stalls.clear()


def _stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(StagingOptions(cuda, False, False, cuda))


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
