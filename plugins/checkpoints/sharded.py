"""The format of sharded checkpoints: a folder with the tensor shards of each rank, and one file for the rest.

step-00000100.ckpt/
  __0_0.distcp, __1_0.distcp ...   tensors, as torch.distributed.checkpoint (DCP) writes them, of each rank
  __0.parts, __1.parts ...         where the parts are that a rank holds
  tensors.json                     names, shapes and types of all tensors; earlier versions wrote all of that into .metadata
  state.pt                         the rest: loops, callbacks, data position, configuration
  manifest.json                    size and SHA-256 of each of those
  complete                         SHA-256 of the manifest; written last
  damaged                          why ranks refused it when they read it together; it is not loaded again

A checkpoint may be untrusted: reading it runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from plugins.checkpoints import remote_copies, schema
from plugins.checkpoints.checked_files import MANIFEST, Damage, Files, check, read_checked
from plugins.checkpoints.part_tables import PARTS, TENSORS, PartTables
from plugins.checkpoints.sharded_form import WEIGHTS, join
from plugins.checkpoints.whole_description import METADATA, WholeDescription

STATE, MARKER, DAMAGED = "state.pt", "complete", "damaged"

ALL, NONE = slice(None), slice(0)
"""Which ranks' files are read to check whether a checkpoint is complete."""

MOST_MANIFEST_BYTES = 2**28


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        source: The checkpoint.
        key: The name of the tensor in it.
        shape: Shape of the full tensor.
        dtype: Data type of the tensor.
    """

    source: Opened = field(repr=False, compare=False)
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read_into(self, target: Tensor) -> None:
        """Reads it into a tensor of its shape, or this rank's shard into a DTensor."""
        load_tensors([(self, target)])


def is_sharded(path: Path) -> bool:
    """Returns whether a path is a sharded checkpoint, complete or not."""
    return path.is_dir() and any(
        (path / name).exists() for name in (STATE, TENSORS, METADATA, MANIFEST, MARKER)
    )


# -- the form on the disk ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A sharded checkpoint, or a rank's share of it, that was found complete.

    Attributes:
        folder: The checkpoint.
        files: Name -> size in bytes and SHA-256 of each file, by the manifest.
        digest: SHA-256 of the manifest.
        description: Names, shapes and types of the tensors, and where their parts are; None if it was not read.
        newest_ns: Latest modification time of the tensor files that were checked, as `st_mtime_ns`.
    """

    folder: Path
    files: Files
    digest: str
    description: PartTables | WholeDescription | None
    newest_ns: int

    def __deepcopy__(self, memo: Any) -> Opened:
        """Returns itself: Lightning copies states of callbacks, in which tensors may be stored ones."""
        return self

    def changed_until(self, newest_ns: int) -> Opened:
        """Returns it with the latest modification time of the tensor files that all ranks have checked."""
        return replace(self, newest_ns=newest_ns)

    def require_unchanged(self, name: str, found: os.stat_result) -> None:
        """Raises an OSError if a file is not the one that some rank has read to check it."""
        if found.st_size != self.files[name]["bytes"] or found.st_mtime_ns > self.newest_ns:
            raise OSError(f"{name} has changed since it was checked")


def defect(folder: Path, read: slice = ALL) -> str | None:
    """Returns why a folder is not a complete, undamaged checkpoint, or None; see :func:`opened`."""
    try:
        opened(folder, read)
    except Damage as damage:
        return str(damage)
    return None


def opened(folder: Path, read: slice = ALL) -> Opened:
    """Reads what describes a checkpoint, and a share of its tensor files, and compares them with their checksums.

    Args:
        folder: The checkpoint.
        read: Which ranks' files are looked at. `slice(rank, None, ranks)` is the share of one rank. With `NONE` the
            description of the tensors is not read either.

    Raises:
        Damage: If the folder is not a complete, undamaged checkpoint.
    """
    if read == NONE and (folder / DAMAGED).is_file():
        with open(folder / DAMAGED, encoding="utf-8", errors="replace") as file:
            raise Damage(file.read(1000))
    manifest, digest = _manifest(folder)
    try:
        files = json.loads(manifest)["files"]
        if strange := next((name for name in files if Path(name).name != name), None):
            raise Damage(f"{MANIFEST} names {strange}, which is not in the folder")
        if STATE not in files or not files.keys() & {TENSORS, METADATA}:
            raise Damage(f"{MANIFEST} names no {STATE} or {TENSORS}")
        check(folder, STATE, files)
        if remote_copies.is_copy(folder):  # whose files of ranks are checked when they are downloaded
            newest = sys.maxsize
        else:
            newest = max((check(folder, name, files) for name in _of_ranks(files)[read]), default=0)
            for name in _of_ranks(files, tables=True)[read]:
                check(folder, name, files)
        description = _described(folder, files) if read != NONE else None
    except Damage:
        raise
    except Exception as error:  # pickle and json raise a dozen kinds on invalid input
        raise Damage(f"{MANIFEST}, {TENSORS} or {METADATA} cannot be read") from error
    if reason := schema.file_defect(folder / STATE):
        raise Damage(f"{STATE}: {reason}")
    return Opened(folder, files, digest, description, newest)


def _of_ranks(files: Files, tables: bool = False) -> list[str]:
    """Returns the ranks' data files, or tables, in the order of ranks: one that resumes checks what it reads itself."""

    def number(name: str) -> tuple[int, str]:
        found = re.match(r"__(\d{1,9})", name)
        return int(found[1]) if found else -1, name

    names = files.keys() - {STATE, TENSORS, METADATA}
    return sorted((name for name in names if name.endswith(PARTS) == tables), key=number)


def _manifest(folder: Path) -> tuple[bytes, str]:
    """Returns the manifest and its SHA-256, which is that of the marker."""
    for name in (MARKER, MANIFEST):
        if (folder / name).exists() and not (folder / name).is_file():  # reading a pipe would block
            raise Damage(f"{name} is not a regular file")
    try:
        with open(folder / MARKER, encoding="ascii") as file:
            marker = file.read(256).strip()
        if (folder / MANIFEST).stat().st_size > MOST_MANIFEST_BYTES:
            raise Damage(f"{MANIFEST} is larger than {MOST_MANIFEST_BYTES:,} bytes")
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise Damage(f"it has no {Path(error.filename).name}: it was not written to the end") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Damage(f"its {MARKER} or {MANIFEST} cannot be read") from error
    if hashlib.sha256(content).hexdigest() != marker:
        raise Damage(f"{MANIFEST} is damaged")
    return content, marker


def _described(folder: Path, files: Files) -> PartTables | WholeDescription:
    """Returns what describes the tensors: of the bytes that were compared with their checksum."""
    name = TENSORS if TENSORS in files else METADATA
    found = read_checked(folder, name, files)
    described: PartTables | WholeDescription
    if name == TENSORS:
        described = PartTables(found, files, partial(_read_table, folder, files))
    else:
        described = WholeDescription(found, files)
    claimed = sum(size.numel() * dtype.itemsize for size, dtype in described.tensors.values())
    if claimed > (stored := sum(files[data]["bytes"] for data in _of_ranks(files))):
        raise Damage(f"{name} claims {claimed:,} bytes of tensors, its files hold {stored:,}")
    return described


def _read_table(folder: Path, files: Files, name: str) -> bytes:
    remote_copies.provide_file(folder / name)
    return read_checked(folder, name, files)


# -- reading -----------------------------------------------------------------------------------------


def read_without_tensors(source: Opened) -> dict[str, Any]:
    """Returns the content of a complete checkpoint with :class:`Stored` in place of tensors."""
    folder, tensors = source.folder, source.description.tensors if source.description else {}
    described = {key: Stored(source, key, shape, dtype) for key, (shape, dtype) in tensors.items()}
    rest = state(folder)
    try:
        joined = join(described, rest)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: {STATE} and {TENSORS} do not belong together ({error!r}).") from error
    if wrong := schema.fault(joined):
        raise ConfigError(f"{folder}: {wrong}: it is damaged or was not written by `python -m core fit`.")
    return joined


def state(folder: Path) -> dict[str, Any]:
    """Returns everything but the tensors of model and optimizers."""
    found: Any = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if wrong := schema.fault(found):
        raise ConfigError(f"{folder}: {wrong}: it is damaged or was not written by `python -m core fit`.")
    result: dict[str, Any] = found
    return result


def opened_or_refused(folder: Path) -> Opened:
    """Returns a checkpoint of which all files were read and compared with their checksums.

    Raises:
        ConfigError: If the folder is not a complete checkpoint.
    """
    try:
        return opened(folder)
    except Damage as damage:
        raise ConfigError(
            f"{folder}: {damage}. --ckpt_path last finds the newest complete checkpoint."
        ) from damage


def read_sharded(folder: Path, optimizers: bool = True) -> dict[str, Any]:
    """Returns a checkpoint as a single process would have written it, with tensors on the CPU.

    Args:
        folder: The checkpoint.
        optimizers: Whether to read the optimizers' states; otherwise they are empty.

    Raises:
        ConfigError: If the folder is not a complete checkpoint.
    """
    return read_opened(opened_or_refused(folder), optimizers)


def read_opened(source: Opened, optimizers: bool = True) -> dict[str, Any]:
    """Returns what :func:`read_sharded` does, of a checkpoint that was checked."""
    found = read_without_tensors(source)
    pairs: list[tuple[Stored, Tensor]] = []

    def loaded(value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        pairs.append((value, torch.empty(value.shape, dtype=value.dtype)))
        return pairs[-1][1]

    for section in WEIGHTS & found.keys():
        found[section] = {name: loaded(value) for name, value in found[section].items()}
    for optimizer in found.get("optimizer_states", ()):
        states = optimizer["state"].items() if optimizers else ()
        optimizer["state"] = {n: {name: loaded(v) for name, v in values.items()} for n, values in states}
    if "callbacks" in found:
        found["callbacks"] = _each(found["callbacks"], loaded)
    load_tensors(pairs)
    return found


def _each(state: Any, loaded: Callable[[Any], Any]) -> Any:
    if type(state) is dict:
        return {name: _each(value, loaded) for name, value in state.items()}
    return loaded(state)


def load_tensor(stored: Stored) -> Tensor:
    """Reads one tensor, whole."""
    found = torch.empty(stored.shape, dtype=stored.dtype)
    load_tensors([(stored, found)])
    return found


def load_tensors(pairs: Iterable[tuple[Stored, Tensor]]) -> None:
    """Reads tensors, or this rank's shards of DTensors; does not communicate with other ranks.

    Args:
        pairs: Stored tensors of one checkpoint, each with the tensor of the same full shape to read into.
    """
    targets: dict[str, Any] = {}
    sources: list[Opened] = []
    for stored, target in pairs:
        targets[stored.key], sources = target.detach(), [stored.source]
    if not sources:
        return
    [source], folder = sources, sources[0].folder
    assert source.description is not None  # what is stored was found in it
    try:
        metadata = source.description.parts_for(targets)
    except (Damage, OSError) as error:
        raise ConfigError(f"{folder} cannot be read: {error}.") from error
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem

    class CheckedFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            remote_copies.provide_file(Path(path))
            with super().create_stream(path, mode) as stream:
                source.require_unchanged(Path(path).name, os.fstat(stream.fileno()))
                yield stream

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise ConfigError(f"{folder}: {read_item.dest_index.fqn} is not stored as a tensor.")

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            reader = Reader(folder)
            reader.fs = CheckedFiles()
            dcp.load(targets, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = next(iter(error.failures.values()))[0]
            if not isinstance(cause, Exception):  # Ctrl-C, for one
                raise cause from error
            raise ConfigError(f"{folder} cannot be read: {str(cause).splitlines()[0]}") from error
