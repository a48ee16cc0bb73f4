"""Writes a checkpoint folder together with the other ranks, so that it is there as a whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from core.checkpoints import sharded
from core.files import durable
from plugins.checkpoints.atomic_checkpoint import failure, reason, remove, remove_leftovers, set_aside


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # what caused it would not get to the other ranks
            raise OSError(errno.EIO, reason(error)) from error

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's own names the temporary folder


def write(
    path: Path, tensors: dict[str, Tensor], rest: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Writes a checkpoint under a temporary name, and gives it its own once every rank's part is on the disk.

    Args:
        path: The folder to make.
        tensors: What `core.checkpoints.sharded.split` returned on this rank.
        rest: The same, without tensors of model and optimizers; counts on the first rank.
        group: The ranks that write, each of which calls this; None: this one alone.

    Raises:
        ConfigError: On every rank, if one of them could not write.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    rank = dist.get_rank(group) if group is not None else 0
    try:
        _together(group, lambda: _begin(temporary) if rank == 0 else None)
        _save(temporary, tensors, group)
        parts = _together(group, lambda: _own_part(temporary, rank, rest))
        _together(group, lambda: _finish(path, temporary, rest, parts) if rank == 0 else None)
    except (Exception, CheckpointException) as error:
        cause = _first(error)
        written = sum(file.stat().st_size for file in temporary.glob("*")) if rank == 0 else 0
        if rank == 0:
            with suppress(OSError):
                remove(temporary)
        raise failure(path, cause, written) from cause


def _together(group: dist.ProcessGroup | None, action: Callable[[], Any]) -> list[Any]:
    """Returns what each rank's action returned; raises on all what one raised."""
    try:
        outcome = action()
    except Exception as error:
        outcome = error
    outcomes = [outcome]
    if group is not None:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
    if error := next((found for found in outcomes if isinstance(found, Exception)), None):
        raise error
    return outcomes


def _begin(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(temporary.parent)
    temporary.mkdir()


def _save(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        writer = _Writer(folder)
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def _own_part(folder: Path, rank: int, rest: dict[str, Any]) -> dict[str, Any]:
    """Returns checksums of this rank's files, and what only this rank knows of a pipeline's stage."""
    files = {path.name: sharded.checksum(path) for path in folder.glob(f"__{rank}_*")}
    states = [optimizer["state"] for optimizer in rest.get("optimizer_states", ())]
    return {"files": files, "order": rest[sharded.ORDER], "states": states, "weights": rest["state_dict"]}


def _finish(path: Path, temporary: Path, rest: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    order = dict.fromkeys(name for part in parts for name in part["order"])
    weights = {name: value for part in parts for name, value in part["weights"].items()}
    rest = {**rest, sharded.ORDER: list(order), "state_dict": weights}
    for index, optimizer in enumerate(rest.get("optimizer_states", ())):
        optimizer["state"] = {n: v for part in parts for n, v in part["states"][index].items()}
    torch.save(rest, temporary / sharded.STATE)
    files = {name: sums for part in parts for name, sums in part["files"].items()}
    if missing := [name for name in files if not (temporary / name).is_file()]:
        raise OSError(f"{missing[0]} is not seen by rank 0: ranks have to write to one and the same disk")
    files |= {name: sharded.checksum(temporary / name) for name in (sharded.STATE, sharded.METADATA)}
    manifest = json.dumps({"files": dict(sorted(files.items()))}, indent=1).encode()
    durable.write(temporary / sharded.MANIFEST, manifest)
    durable.sync_all(temporary)
    durable.write(temporary / sharded.MARKER, hashlib.sha256(manifest).hexdigest() + "\n")
    before = set_aside(path)  # of the same step, which the run has come to again
    os.replace(temporary, path)
    durable.sync(path.parent)
    remove(before)


def _first(error: BaseException) -> Any:
    """Returns what went wrong on the first rank where something did."""
    failures = getattr(error, "failures", None)  # a CheckpointException
    return next(iter(failures.values()))[0] if failures else error
