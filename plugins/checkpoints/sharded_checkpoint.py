"""Checkpoints that each rank writes its own part of, while training goes on."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map

from core.checkpoints import sharded
from core.errors import ConfigError
from core.technique import technique
from plugins.checkpoints.atomic_checkpoint import AtomicCheckpoint
from plugins.checkpoints.shard_writing import write


@technique(
    paper="torch.distributed.checkpoint; snapshot, then write in the background: CheckFreq, FAST 2021, section 4"
)
class ShardedCheckpoint(AtomicCheckpoint):
    """Each rank writes its own part of a checkpoint into one folder, while training goes on.

    The run goes on from it with any strategy on any number of ranks; all of them need the same disk. A folder is
    there as a whole or not at all, and holds checksums; it is read without running code. `consolidate` makes the
    single file of it. Under strategies with whole copies of the model (one process, `DDP`), rank 0 writes.

    Args:
        asynchronous: Whether training goes on as soon as tensors are copied to the host, which takes as much of its
            memory as a rank's parts; the next checkpoint waits for the one before.

    Attributes:
        stall_s: For how many seconds the last checkpoint held training up.

    Raises:
        ConfigError: If a checkpoint could not be written; of one in the background, when the next begins or the
            run ends.

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
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._stager: DefaultStager | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint of a whole model; called on rank 0."""
        self._begin(checkpoint, Path(path), None)

    def connect(self) -> None:
        """Lets the ranks meet for the background, where messages must not get between those of training.

        Called on every rank as the run starts: of one that dies while they meet, the others notice nothing.
        """
        self._group = dist.new_group(backend="gloo")

    def save_parts(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Writes what this rank has of a checkpoint; called on every rank."""
        self._begin(checkpoint, Path(path), self._group)

    def _begin(self, checkpoint: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
        start = time.perf_counter()
        self.wait()
        tensors, rest = sharded.split(checkpoint)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        if self.asynchronous:
            tensors, rest = self._snapshot(tensors), tree_map(_copied, rest)
        # A thread in both cases: Ctrl-C, which only the main one sees, does not get into torch's writer.
        self._pending = self._thread.submit(write, path, tensors, rest, group)
        if not self.asynchronous:
            self.wait()
        self.stall_s = time.perf_counter() - start
        self._stalls.append(self.stall_s)

    def _snapshot(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if self._stager is None:  # keeps its memory for the next checkpoint
            self._stager = _stager()
        copied: Any
        try:
            copied = self._stager.stage(tensors)
        except KeyError:  # torch 2.11 empties it behind its first use
            self._stager = _stager()
            copied = self._stager.stage(tensors)
        return dict(copied)

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, if any.

        Raises:
            ConfigError: If it could not be written.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        finally:
            if pending.done():
                self._pending = None

    def teardown(self) -> None:
        """Waits at the end of the run, however it ends; says how long checkpoints held it up."""
        failed = sys.exc_info()[1] is not None
        try:
            self.wait()
        except ConfigError as error:
            if not failed:
                raise
            print(error, file=sys.stderr)  # the run ends with another error
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
        if self._stalls and (not dist.is_initialized() or dist.get_rank() == 0):
            most, total = max(self._stalls) * 1e3, sum(self._stalls) * 1e3
            told = f"{most:,.1f} ms at most, {total:,.1f} ms in all ({len(self._stalls)} written)"
            print(f"Checkpoints held training up for {told}.", flush=True)
        self._stalls.clear()


def _stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(StagingOptions(cuda, False, False, cuda))


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
