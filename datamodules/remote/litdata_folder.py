"""Folders that litdata wrote, on object storage or compressed, read through the cache of remote folders."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow

from core import durable
from core.errors import ConfigError
from datamodules.packing.token_index import INDEX, TokenIndex, parsed_index
from datamodules.remote import remote_folder
from datamodules.remote.remote_folder import AtMost, RemoteFolder, writing
from toolkit.bounded import MOST_BYTES, parse_json, read_inside
from toolkit.prepared import is_remote

_PACKED = 1 << 20
"""Bytes by which a compressed chunk may be larger than its content."""


@dataclass(eq=False)
class LitdataFolder(RemoteFolder):
    """A folder that litdata wrote, and its local copy, which caches chunks; compressed ones are kept decompressed.

    There are no checksums: a chunk is held against the size that index.json gives, and against its own header.

    Args:
        compressed: Whether chunks are compressed as a whole.
    """

    compressed: bool = False

    def _head(self, name: str, size: int) -> bytes:
        return self._mapped_head(name, size) if self.compressed else super()._head(name, size)

    def _download(self, name: str, stream: IO[bytes]) -> None:
        size = self.files[name]["bytes"]
        stream.truncate(size)  # reserves the room, which other processes count
        self._make_room()
        stream.truncate(0)
        stream.seek(0)
        if self.compressed:
            with tempfile.TemporaryFile(dir=self.folder) as packed:
                self.get(name, AtMost(packed, size + _PACKED))
                packed.seek(0)
                self._unpack(name, packed, stream)
        else:
            self.get(name, AtMost(stream, size + _PACKED))
        if (found := stream.seek(0, os.SEEK_END)) != size:
            raise ConfigError(f"{self.url}/{name} is damaged: it has {found:,} bytes, {INDEX} says {size:,}.")

    def _unpack(self, name: str, packed: IO[bytes], stream: IO[bytes]) -> None:
        try:
            reader = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, "r"), "zstd")
            shutil.copyfileobj(reader, AtMost(stream, self.files[name]["bytes"]))
        except (pyarrow.ArrowException, ValueError) as error:
            raise ConfigError(f"{self.url}/{name} is damaged: {error}.") from error
        except OSError as error:  # pyarrow's have no number
            if error.errno is not None:
                raise
            raise ConfigError(f"{self.url}/{name} is damaged: {error}.") from error


def open_litdata(
    url: str, cache_dir: Path, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
) -> Path:
    """Downloads the index of a folder of tokens; chunks are downloaded, and decompressed, when they are read.

    Args:
        url: The folder that holds index.json; `local:PATH` for one on this machine.
        cache_dir: Holds the local copy under `remote/`, named by a hash of URL and index.
        cache_bytes: Most bytes of chunks to keep; see :func:`datamodules.remote.remote_folder.open_remote`.
        storage_options: Options of the storage's client.

    Returns:
        The local copy.

    Raises:
        ConfigError: If it cannot be read, is no folder of tokens, or the cache cannot be written.
    """
    if cache_bytes is not None and cache_bytes < 1:
        raise ConfigError(f"data.cache_bytes is {cache_bytes}; it must be at least 1.")
    parent, _, name = url.rstrip("/").rpartition("/")
    root, content = cache_dir / "remote", io.BytesIO()
    remote = LitdataFolder(parent or "/", root, 0, dict(storage_options or {}))
    remote.get(f"{name}/{INDEX}", AtMost(content, MOST_BYTES))
    index = _indexed(url, content.getvalue())
    remote.compressed = index.compressed
    sizes = zip(index.names, index.sizes.tolist(), strict=True)
    remote.files = {f"{name}/{chunk}": {"bytes": size} for chunk, size in sizes}
    digest = hashlib.sha256(repr((url, _changes(url, index))).encode() + content.getvalue())
    remote.folder = root / digest.hexdigest()[:16]
    copy = remote.folder / name
    with writing(root):
        copy.mkdir(parents=True, exist_ok=True)
        if not (copy / INDEX).exists():
            durable.write(copy / INDEX, content.getvalue())
        remote.limit = cache_bytes or remote_folder.room(root)
    remote_folder.register(remote)
    return copy


def has_index(url: str, storage_options: Mapping[str, Any] | None, cache_dir: Path) -> bool:
    """Returns whether a URL has an index.json; False also where it cannot be read."""
    parent, _, name = url.rstrip("/").rpartition("/")
    remote = LitdataFolder(parent, cache_dir, 0, dict(storage_options or {}))
    try:
        remote.get(f"{name}/{INDEX}", AtMost(io.BytesIO(), MOST_BYTES))
    except ConfigError:
        return False
    return True


def refuse_tokens(source: str) -> None:
    """Raises a ConfigError if a source holds tokens that litdata wrote: they have no manifest."""
    root = Path(os.path.expanduser(source))
    if any(_holds_tokens(root / name) for name in ("", "train")):
        raise ConfigError(
            f"{source} has an index.json, as litdata.optimize writes, and no manifest.json of prepare. Tokens of litdata are "
            "read by\nanother data module: --config data/litdata --data.source=... --data.tokenizer.path=FILE"
        )


def _holds_tokens(folder: Path) -> bool:
    """Returns whether a folder has litdata's index of tokens; that of texts is for readers of documents."""
    try:
        config = parse_json(read_inside(folder, INDEX))["config"]
        return any("no_header" in str(kind) for kind in config["data_format"])
    except (OSError, ValueError, TypeError, LookupError):
        return False


def _indexed(url: str, content: bytes) -> TokenIndex:
    try:
        index = parsed_index(content)
        if wrong := [name for name in index.names if not name.endswith(".bin")]:
            raise ValueError(f"it lists {wrong[0]}, which is no .bin")
    except ValueError as error:
        raise ConfigError(f"{url}/{INDEX} is damaged, or of no folder of tokens: {error}.") from error
    return index


def _changes(url: str, index: TokenIndex) -> list[int]:
    """Returns when the files of a folder on this machine were changed: what was decompressed before is then not used."""
    if is_remote(url) and not url.startswith("local:"):
        return []
    folder, found = Path(url.removeprefix("local:")), []
    for name in index.names:
        try:
            found.append((folder / name).stat().st_mtime_ns)
        except OSError:  # said when it is read
            found.append(0)
    return np.array(found, np.int64).tolist()
