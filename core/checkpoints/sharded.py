"""Checkpoints that are folders: tensors in the parts that ranks wrote, and everything else in one small file.

step-00000100.ckpt/
  __0_0.distcp, __1_0.distcp ...   tensors, as torch.distributed.checkpoint (DCP) writes them, of each rank
  .metadata                        which part of which tensor lies where
  state.pt                         the rest: loops, callbacks, data position, configuration
  manifest.json                    size and SHA-256 of each of those
  complete                         SHA-256 of the manifest; written last
  damaged                          what ranks found wrong that read it together; nobody takes it for whole then

A checkpoint may come from a stranger: reading it runs no code.
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

STATE, METADATA, MANIFEST, MARKER, DAMAGED = "state.pt", ".metadata", "manifest.json", "complete", "damaged"
ORDER = "state_dict_order"
"""Key in the small file: the names of all weights, in the order of the model."""

ALL, NONE = slice(None), slice(0)
"""Which files with tensors are read to see whether a checkpoint is whole."""

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
    """A tensor of a checkpoint that has not been read.

    Attributes:
        folder: The checkpoint.
        key: The tensor's name in it.
        shape: Of the whole tensor.
        dtype: Of its elements.
    """

    folder: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype


def is_sharded(path: Path) -> bool:
    """Returns whether a path is a checkpoint of this form, whole or not."""
    return path.is_dir() and any((path / name).exists() for name in (STATE, METADATA, MANIFEST, MARKER))


# -- the form on the disk ---------------------------------------------------------------------------


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of model and optimizers by key, and the checkpoint without them.

    Args:
        checkpoint: Of a single process, or what one rank has of it: `optimizer_states` go by the numbers of the
            whole model's parameters.
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
    """Returns the checkpoint that was split; changes `rest`."""
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
    """Returns why a folder is no whole checkpoint, or None if every byte that is read is as it was written.

    Args:
        folder: The checkpoint.
        read: Which of the files with tensors are read, in the order of their names; of the others the sizes are
            compared. `slice(rank, None, ranks)` is one rank's share.
    """
    if read == NONE and (folder / DAMAGED).is_file():
        return (folder / DAMAGED).read_text(encoding="utf-8")
    try:
        marker = (folder / MARKER).read_text(encoding="ascii").strip()
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
    except Exception:  # pickle and json raise a dozen kinds on what is no manifest or metadata
        return f"{MANIFEST} or {METADATA} cannot be read"


def _defect(folder: Path, files: Mapping[str, Mapping[str, Any]], read: slice) -> str | None:
    from core.checkpoints.checkpoint import defect as defect_of_file

    small = {STATE, METADATA}
    whole = {*small, *sorted(files.keys() - small)[read]}
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name:
            return f"{MANIFEST} names {name}, which lies elsewhere"
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat()
        if found.st_size != expected["bytes"]:
            return f"{name} is damaged"
        if name in whole and _checksum(path, found.st_mtime_ns, found.st_size) != expected:
            return f"{name} is damaged"
    if not small <= files.keys():
        return f"{MANIFEST} names no {STATE} or {METADATA}"
    metadata = _metadata(folder)
    used = {place.relative_path for place in metadata.storage_data.values()}
    if unknown := used - files.keys():
        return f"{METADATA} names {min(unknown)}, which {MANIFEST} does not"
    if any(not hasattr(entry, "size") for entry in metadata.state_dict_metadata.values()):
        return f"{METADATA} has entries that are no tensors, which could run code"
    reason = defect_of_file(folder / STATE)
    return f"{STATE}: {reason}" if reason else None


@cache  # a run looks for its checkpoint, then loads it
def _checksum(path: Path, changed_ns: int, size: int) -> dict[str, Any]:
    return checksum(path)


class _Unpickler(pickle.Unpickler):
    """Knows nothing but DCP's own records: a checkpoint may come from a stranger."""

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


def outline(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint that is known to be whole, without its tensors: in their place stands where they are."""
    entries = _metadata(folder).state_dict_metadata.items()
    described = {key: Stored(folder, key, entry.size, entry.properties.dtype) for key, entry in entries}
    return join(described, state(folder))


def state(folder: Path) -> dict[str, Any]:
    """Returns everything but the tensors of model and optimizers."""
    found: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return found


def read(folder: Path, optimizers: bool = True) -> dict[str, Any]:
    """Returns a checkpoint as a single process would have written it, tensors on the CPU.

    Args:
        folder: The checkpoint.
        optimizers: Whether to read the optimizers' states; left out, they are empty.

    Raises:
        ConfigError: If the folder is not whole.
    """
    if reason := defect(folder):
        raise ConfigError(f"{folder}: {reason}. --ckpt_path last finds the newest whole checkpoint.")
    found = outline(folder)
    pairs: list[tuple[Stored, Tensor]] = []

    def whole(value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        pairs.append((value, torch.empty(value.shape, dtype=value.dtype)))
        return pairs[-1][1]

    found["state_dict"] = {name: whole(value) for name, value in found["state_dict"].items()}
    for optimizer in found.get("optimizer_states", ()):
        states = optimizer["state"].items() if optimizers else ()
        optimizer["state"] = {n: {name: whole(v) for name, v in values.items()} for n, values in states}
    fill(pairs)
    return found


def fill(pairs: Iterable[tuple[Stored, Tensor]]) -> None:
    """Reads tensors, or the parts of DTensors that this rank holds, from wherever they lie; waits for no other rank.

    Args:
        pairs: What is stored, of one checkpoint, and the tensor of the same whole shape to read it into.
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
            raise ConfigError(f"{folder}: {read_item.dest_index.fqn} is stored as no tensor.")

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=Reader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = next(iter(error.failures.values()))[0]
            raise ConfigError(f"{folder} cannot be read: {str(cause).splitlines()[0]}") from error
