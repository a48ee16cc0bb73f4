"""The description of all parts of all ranks in one file, `.metadata`, as earlier versions wrote it: a pickle of DCP.

It is read without running code.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plugins.checkpoints.checked_files import MANIFEST, Damage

METADATA = ".metadata"

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


class WholeDescription:
    """What DCP wrote of all tensors.

    Args:
        content: The file.
        files: The names that it may refer to.

    Attributes:
        tensors: Name -> shape and data type.

    Raises:
        Damage: If it holds anything but places of tensors in these files.
    """

    def __init__(self, content: bytes, files: Iterable[str]) -> None:
        try:
            with without_collector():
                found = _Unpickler(io.BytesIO(content)).load()
        except pickle.UnpicklingError as error:
            raise Damage(
                f"{METADATA} holds more than places of tensors ({error}), which could run code"
            ) from error
        if unknown := {place.relative_path for place in found.storage_data.values()} - set(files):
            raise Damage(f"{METADATA} names {min(unknown)}, which {MANIFEST} does not")
        entries = found.state_dict_metadata
        if any(not hasattr(entry, "size") for entry in entries.values()):
            raise Damage(f"{METADATA} has entries that are not tensors, which could run code")
        self.tensors = {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}
        self._metadata = found

    def parts_for(self, targets: Mapping[str, Tensor]) -> Any:
        """Returns DCP's `Metadata`, which describes all parts of all tensors."""
        return self._metadata


@contextmanager
def without_collector() -> Iterator[None]:
    """Stops the garbage collector, which would go through what is read again and again: millions of parts, all in use."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class _Unpickler(pickle.Unpickler):
    """Loads DCP's own records only: a checkpoint may be untrusted."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)
