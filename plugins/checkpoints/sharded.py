"""The format of sharded checkpoints: a folder with the tensor shards of each rank, and one file for the rest.

step-00000100.ckpt/
  __0_0.distcp, __1_0.distcp ...   tensors, as torch.distributed.checkpoint (DCP) writes them, of each rank
  .metadata                        where each part of each tensor is
  state.pt                         the rest: loops, callbacks, data position, configuration
  manifest.json                    size and SHA-256 of each of those
  complete                         SHA-256 of the manifest; written last
  damaged                          why ranks refused it when they read it together; it is not loaded again

A checkpoint may be untrusted: reading it runs no code.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from plugins.checkpoints import schema

STATE, METADATA, MANIFEST, MARKER, DAMAGED = "state.pt", ".metadata", "manifest.json", "complete", "damaged"
ORDER = "state_dict_order"
"""Key in `state.pt`: the names of all weights, in the order of the model."""

ALL, NONE = slice(None), slice(0)
"""Which tensor files are read to check whether a checkpoint is complete."""

MOST_MANIFEST_BYTES = 2**28

_DCP = "torch.distributed.checkpoint."
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_DCP + "filesystem", "_StorageInfo"),
    *(
        (_DCP + "metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        folder: The checkpoint.
        key: The name of the tensor in it.
        shape: Shape of the full tensor.
        dtype: Data type of the tensor.
    """

    folder: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype


def is_sharded(path: Path) -> bool:
    """Returns whether a path is a sharded checkpoint, complete or not."""
    return path.is_dir() and any((path / name).exists() for name in (STATE, METADATA, MANIFEST, MARKER))


# -- the form on the disk ---------------------------------------------------------------------------


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of model and optimizers by key, and the checkpoint without them.

    Args:
        checkpoint: The checkpoint of a single process, or the part of one rank. Keys of `optimizer_states` are the
            indices of the full model's parameters.
    """
    weights = checkpoint["state_dict"]
    tensors = {f"state_dict.{name}": v.detach() for name, v in weights.items() if isinstance(v, Tensor)}
    optimizers = []
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        plain: dict[int, dict[str, Any]] = {}
        for number, values in optimizer["state"].items():
            plain[number] = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer_states.{index}.{number}.{name}"] = value.detach()
                else:
                    plain[number][name] = value
        optimizers.append({**optimizer, "state": plain})
    rest = {**checkpoint, "state_dict": {n: v for n, v in weights.items() if not isinstance(v, Tensor)}}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = optimizers
    return tensors, {**rest, ORDER: list(weights)}


def join(tensors: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint that :func:`split` divided; changes `rest`."""
    order = rest.pop(ORDER, [])
    weights = rest["state_dict"]
    for key, value in tensors.items():
        section, _, name = key.partition(".")
        if section == "state_dict":
            weights[name] = value
            continue
        index, number, name = name.split(".", 2)
        state = rest["optimizer_states"][int(index)]["state"]
        state.setdefault(int(number), {})[name] = value
    for optimizer in rest.get("optimizer_states", ()):
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    rest["state_dict"] = {
        name: weights[name] for name in dict.fromkeys([*order, *weights]) if name in weights
    }
    return rest


def checksum(path: Path) -> dict[str, Any]:
    """Returns the size of a file in bytes, and its SHA-256."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def defect(folder: Path, read: slice = ALL) -> str | None:
    """Returns why a folder is not a complete, undamaged checkpoint, or None.

    Args:
        folder: The checkpoint.
        read: Which of the tensor files are read, in the order of their names; of the others only sizes are
            compared. `slice(rank, None, ranks)` is the share of one rank.
    """
    if read == NONE and (folder / DAMAGED).is_file():
        with open(folder / DAMAGED, encoding="utf-8", errors="replace") as file:
            return file.read(1000)
    if (odd := next(filter(_odd, sorted(folder.iterdir())), None)) is not None:
        return f"{odd.name} is not a regular file"
    if (folder / MANIFEST).is_file() and (folder / MANIFEST).stat().st_size > MOST_MANIFEST_BYTES:
        return f"{MANIFEST} is larger than {MOST_MANIFEST_BYTES:,} bytes"
    try:
        with open(folder / MARKER, encoding="ascii") as file:
            marker = file.read(256).strip()
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        return f"it has no {Path(error.filename).name}: it was not written to the end"
    except (OSError, UnicodeDecodeError):
        return f"its {MARKER} or {MANIFEST} cannot be read"
    if hashlib.sha256(content).hexdigest() != marker:
        return f"{MANIFEST} is damaged"
    try:
        return _defect(folder, json.loads(content)["files"], read)
    except pickle.UnpicklingError as error:
        return f"{METADATA} holds more than places of tensors ({error}), which could run code"
    except Exception:  # pickle and json raise a dozen kinds on invalid input
        return f"{MANIFEST} or {METADATA} cannot be read"


def _odd(path: Path) -> bool:
    """Returns whether a path exists and is not a regular file: reading a pipe would block."""
    return path.exists() and not path.is_file()


def _defect(folder: Path, files: Mapping[str, Mapping[str, Any]], read: slice) -> str | None:
    small = {STATE, METADATA}
    hashed = {*small, *sorted(files.keys() - small)[read]}
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name or (folder / name).is_symlink():
            return f"{MANIFEST} names {name}, which is not in the folder"
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat()
        if found.st_size != expected["bytes"]:
            return f"{name} is damaged"
        if name in hashed and _checksum(path, found.st_mtime_ns, found.st_size) != expected:
            return f"{name} is damaged"
    if not small <= files.keys():
        return f"{MANIFEST} names no {STATE} or {METADATA}"
    metadata = _metadata(folder)
    used = {place.relative_path for place in metadata.storage_data.values()}
    if unknown := used - files.keys():
        return f"{METADATA} names {min(unknown)}, which {MANIFEST} does not"
    if any(not hasattr(entry, "size") for entry in metadata.state_dict_metadata.values()):
        return f"{METADATA} has entries that are not tensors, which could run code"
    claimed = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in metadata.state_dict_metadata.values()
    )
    if claimed > (stored := sum(files[name]["bytes"] for name in files.keys() - small)):
        return f"{METADATA} claims {claimed:,} bytes of tensors, its files hold {stored:,}"
    reason = schema.file_defect(folder / STATE)
    return f"{STATE}: {reason}" if reason else None


@cache  # a run checks its checkpoint, then loads it
def _checksum(path: Path, changed_ns: int, size: int) -> dict[str, Any]:
    return checksum(path)


class _Unpickler(pickle.Unpickler):
    """Loads DCP's own records only: a checkpoint may be untrusted."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _metadata(folder: Path) -> Any:
    with open(folder / METADATA, "rb") as file:
        return _Unpickler(file).load()


# -- reading -----------------------------------------------------------------------------------------


def read_without_tensors(folder: Path) -> dict[str, Any]:
    """Returns the content of a complete checkpoint with :class:`Stored` in place of tensors."""
    entries = _metadata(folder).state_dict_metadata.items()
    described = {key: Stored(folder, key, entry.size, entry.properties.dtype) for key, entry in entries}
    rest = state(folder)
    try:
        joined = join(described, rest)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: {STATE} and {METADATA} do not belong together ({error!r}).") from error
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


def read_sharded(folder: Path, optimizers: bool = True) -> dict[str, Any]:
    """Returns a checkpoint as a single process would have written it, with tensors on the CPU.

    Args:
        folder: The checkpoint.
        optimizers: Whether to read the optimizers' states; otherwise they are empty.

    Raises:
        ConfigError: If the folder is not a complete checkpoint.
    """
    if reason := defect(folder):
        raise ConfigError(f"{folder}: {reason}. --ckpt_path last finds the newest complete checkpoint.")
    found = read_without_tensors(folder)
    pairs: list[tuple[Stored, Tensor]] = []

    def loaded(value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        pairs.append((value, torch.empty(value.shape, dtype=value.dtype)))
        return pairs[-1][1]

    found["state_dict"] = {name: loaded(value) for name, value in found["state_dict"].items()}
    for optimizer in found.get("optimizer_states", ()):
        states = optimizer["state"].items() if optimizers else ()
        optimizer["state"] = {n: {name: loaded(v) for name, v in values.items()} for n, values in states}
    load_tensors(pairs)
    return found


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
    folder = Path()
    for stored, target in pairs:
        targets[stored.key], folder = target.detach(), stored.folder
    if not targets:
        return
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _metadata(Path(self.path))

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            raise ConfigError(f"{folder}: {read_item.dest_index.fqn} is not stored as a tensor.")

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=Reader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = next(iter(error.failures.values()))[0]
            if not isinstance(cause, Exception):  # Ctrl-C, for one
                raise cause from error
            raise ConfigError(f"{folder} cannot be read: {str(cause).splitlines()[0]}") from error
