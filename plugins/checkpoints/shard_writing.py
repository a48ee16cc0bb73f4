"""Writes a sharded checkpoint together with the other ranks; the folder is either complete or absent.

On object storage each rank uploads its own files; the first one uploads the rest, `complete` last. What cannot be uploaded
becomes complete on the disk instead, if all ranks write to the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from core import durable
from core.errors import ConfigError
from plugins.checkpoints import sharded, sharded_form
from plugins.checkpoints.atomic_checkpoint import failure, remove, remove_leftovers, set_aside
from plugins.checkpoints.checked_files import MANIFEST, sums_of
from plugins.checkpoints.hashed_files import HashedFiles
from plugins.checkpoints.part_tables import TENSORS, tensor_table
from plugins.checkpoints.patience import Patience, no_room
from plugins.checkpoints.rank_files import RankFiles
from plugins.checkpoints.uploads import complete, delete_staged, upload
from plugins.checkpoints.written_once import writers
from toolkit import remote_checkpoints
from toolkit.object_storage import ObjectFolder


def write(
    path: Path,
    tensors: dict[str, Tensor],
    rest: dict[str, Any],
    group: dist.ProcessGroup | None,
    patience: Patience,
    remote: ObjectFolder | None = None,
) -> None:
    """Writes a checkpoint under a temporary name, and renames it once the shards of all ranks are on the disk.

    If the disk is full, all ranks wait and try again together.

    Args:
        path: The folder to make.
        tensors: What `plugins.checkpoints.sharded_form.split` returned on this rank.
        rest: The other part that `split` returned; that of the first rank is written.
        group: The ranks that write, each of which calls this; None: only this process.
        patience: Waits for space on the disk.
        remote: The folder on object storage that the checkpoint is for; `path` is where it is staged then, on a disk
            that ranks need not share.

    Raises:
        ConfigError: On every rank, if one of them could not write.
    """
    rank = dist.get_rank(group) if group is not None else 0
    while True:
        try:
            _attempt(path, tensors, rest, group, rank, remote)
            break
        except ConfigError as error:
            if not no_room(error):
                raise
            patience.wait(error, quiet=rank != 0)
    patience.over(quiet=rank != 0)


def connect(group: dist.ProcessGroup) -> None:
    """Exchanges between the ranks of a group what `write` does, without content; called by each of them."""
    rank = dist.get_rank(group)
    _by_first(group, rank, lambda: None)
    gathered = _gathered(group, rank, lambda: None)
    dist.scatter_object_list([None], gathered or None, src=0, group=group)


def write_alone(
    path: Path, tensors: dict[str, Tensor], rest: dict[str, Any], read: Callable[[str], Tensor]
) -> None:
    """Writes a checkpoint by this process, without waiting for space. What fails may leave a temporary folder beside.

    Args:
        path: The folder to make.
        tensors: What `plugins.checkpoints.sharded_form.split` returned.
        rest: The other part that `split` returned.
        read: Returns the tensor of a key when its turn has come; `tensors` may be on the meta device.

    Raises:
        OSError: If it cannot be written. What `read` raises is raised, too.
    """
    _write(path, _temporary(path), tensors, rest, None, 0, read, None)


def _attempt(
    path: Path,
    tensors: dict[str, Tensor],
    rest: dict[str, Any],
    group: dist.ProcessGroup | None,
    rank: int,
    remote: ObjectFolder | None,
) -> None:
    temporary = _temporary(path)
    try:
        _write(path, temporary, tensors, rest, group, rank, None, remote)
    except Exception as cause:
        written = sum(file.stat().st_size for file in temporary.glob("*")) if rank == 0 else 0
        if rank == 0 or remote is not None:
            with suppress(OSError):
                remove(temporary)
        if remote is not None and isinstance(cause, ConfigError):  # which says what the storage said
            raise cause from None
        raise failure(path, cause, written) from cause


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _write(
    path: Path,
    temporary: Path,
    tensors: dict[str, Tensor],
    rest: dict[str, Any],
    group: dist.ProcessGroup | None,
    rank: int,
    read: Callable[[str], Tensor] | None,
    remote: ObjectFolder | None,
) -> None:
    own = RankFiles(tensors, read)
    order, known, fault = _by_first(
        group, rank, lambda: _begin(path, temporary, rest, list(own.tensors()), remote)
    )
    chosen = _chosen(group, rank, own)

    def own_part() -> dict[str, Any]:
        files = own.write(temporary, rank, chosen)
        part = _own_part(files, rest, order, rank)
        part["elements"] = own.elements(rank, chosen)
        part["tensors"] = own.tensors(set(known) if rank > 0 else ())
        if remote is not None:
            part["fault"] = fault or _fault(lambda: upload(remote, path.name, temporary, sorted(files)))
        return part

    parts = _gathered(group, rank, own_part)
    _by_first(group, rank, lambda: _finish(path, temporary, rest, parts, remote))
    if remote is not None and rank > 0:
        with suppress(OSError):  # of another machine; on the same disk rank 0 has removed it
            remove(temporary)


def _fault(action: Callable[[], None]) -> ConfigError | None:
    """Returns why something cannot be uploaded, which is no reason to lose it here; None: it is."""
    try:
        action()
    except ConfigError as error:
        return error
    return None


def _by_first(group: dist.ProcessGroup | None, rank: int, action: Callable[[], Any]) -> Any:
    """Returns on every rank what an action returned on the first, or raises there what it raised."""
    told: list[Any] = [None, None]
    if rank == 0:
        try:
            told[0] = action()
        except Exception as raised:
            told[1] = raised
    if group is not None:
        dist.broadcast_object_list(told, src=0, group=group)
    if told[1] is not None:
        raise told[1]
    return told[0]


def _gathered(group: dist.ProcessGroup | None, rank: int, action: Callable[[], Any]) -> list[Any]:
    """Returns what an action returned, or raised, on each rank; on others than the first an empty list."""
    outcome: Any
    try:
        outcome = action()
    except Exception as raised:
        outcome = raised
    if group is None:
        return [outcome]
    outcomes = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(outcome, outcomes, dst=0, group=group)
    return outcomes or []


def _begin(
    path: Path, temporary: Path, rest: dict[str, Any], names: list[str], remote: ObjectFolder | None
) -> tuple[list[str], list[str], ConfigError | None]:
    """Makes the folder, in place of an earlier one on object storage.

    Returns:
        The names of the first rank's weights, and of its tensors, which ranks with the same ones do not send; why nothing
        can be uploaded.
    """
    temporary.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(temporary.parent)
    temporary.mkdir()
    fault = _fault(lambda: remote_checkpoints.begin(remote, path.name)) if remote is not None else None
    return rest[sharded_form.ORDER], names, fault


def _chosen(group: dist.ProcessGroup | None, rank: int, own: RankFiles) -> list[int]:
    """Returns the rank that writes each part of this rank; the first one decides about those that several may hold."""
    if group is None:
        return [0] * len(own)
    numbers, rows = own.shared(dist.get_world_size(group))
    held = _gathered(group, rank, lambda: rows)
    answer: list[Any] = [None]
    told = [ranks.astype(np.int32) for ranks in writers(held)] if held else None
    dist.scatter_object_list(answer, told, src=0, group=group)
    chosen = [rank] * len(own)
    for number, writer in zip(numbers, answer[0].tolist(), strict=True):
        chosen[number] = writer
    return chosen


def _own_part(
    files: dict[str, dict[str, Any]], rest: dict[str, Any], order: list[str], rank: int
) -> dict[str, Any]:
    """Returns this rank's files with their checksums, and the small state of its pipeline stage where it has another."""
    states = [optimizer["state"] for optimizer in rest.get("optimizer_states", ())]
    if rank > 0:
        states = [{number: values for number, values in state.items() if values} for state in states]
    return {
        "files": files,
        "order": rest[sharded_form.ORDER] if rest[sharded_form.ORDER] != order else (),
        "states": states,
        "weights": rest["state_dict"],
    }


def _finish(
    path: Path, temporary: Path, rest: dict[str, Any], parts: list[Any], remote: ObjectFolder | None
) -> None:
    if error := next((part for part in parts if isinstance(part, Exception)), None):
        raise error
    own = _write_state(temporary, rest, parts) | _write_tensors(temporary, parts)
    files = {name: sums for part in parts for name, sums in part["files"].items()}
    missing = sorted(files.keys() - set(os.listdir(temporary)))
    if remote is None and missing:
        raise OSError(f"{missing[0]} is not visible to rank 0: all ranks have to write to the same disk")
    files |= own
    manifest = json.dumps({"files": dict(sorted(files.items()))}, indent=1).encode()
    marker = hashlib.sha256(manifest).hexdigest() + "\n"
    # What the ranks wrote is flushed: each has done it for its own files.
    durable.write(temporary / MANIFEST, manifest)
    fault = next((part["fault"] for part in parts if part.get("fault")), None)
    if remote is not None:
        sizes = {name: sums["bytes"] for name, sums in files.items()}
        if (
            fault is None
            and (fault := _fault(lambda: _upload_rest(remote, path, temporary, sizes, marker))) is None
        ):
            remove(temporary)
            delete_staged(path.parent)
            return
        if missing:
            raise fault
    durable.write(temporary / sharded.MARKER, marker)
    before = set_aside(path)  # an earlier checkpoint of the same step, which the run reached again
    os.replace(temporary, path)
    durable.sync(path.parent)
    remove(before)
    if fault is not None:
        raise fault


def _upload_rest(
    remote: ObjectFolder, path: Path, temporary: Path, sizes: dict[str, int], marker: str
) -> None:
    upload(remote, path.name, temporary, [sharded.STATE, TENSORS, MANIFEST])
    complete(remote, path.name, sizes, marker)


def _write_tensors(folder: Path, parts: list[Any]) -> dict[str, dict[str, Any]]:
    """Writes the table of the tensors of all pipeline stages, if each element of them was written once; returns its checksum."""
    tensors = {name: entry for part in parts for name, entry in part["tensors"].items()}
    expected, found = (
        sum(prod(size) for size, _ in tensors.values()),
        sum(part["elements"] for part in parts),
    )
    if found != expected:
        raise ValueError(f"the ranks hold {found:,} elements of tensors that have {expected:,}")
    content = tensor_table(tensors)
    (folder / TENSORS).write_bytes(content)
    durable.sync(folder / TENSORS)
    return {TENSORS: sums_of(len(content), hashlib.sha256(content))}


def _write_state(folder: Path, rest: dict[str, Any], parts: list[Any]) -> dict[str, dict[str, Any]]:
    """Writes what is not in the tensor files, with the small states of all pipeline stages; returns its checksum."""
    order = dict.fromkeys([*rest[sharded_form.ORDER], *(name for part in parts for name in part["order"])])
    weights = {name: value for part in parts for name, value in part["weights"].items()}
    rest = {**rest, sharded_form.ORDER: list(order), "state_dict": weights}
    for index, optimizer in enumerate(rest.get("optimizer_states", ())):
        optimizer["state"] = {n: v for part in parts for n, v in part["states"][index].items()}
    # With a path, torch would not report the system's reason.
    files = HashedFiles()
    with files.create_stream(folder / sharded.STATE, "wb") as file:
        torch.save(rest, cast(Any, file))
        file.flush()
        os.fsync(file.fileno())
    return files.sums
