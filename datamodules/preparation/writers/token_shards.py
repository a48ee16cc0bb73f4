"""Stores token ids in litdata's chunk format without litdata, which imports torch (in every worker)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from core import durable
from core.contracts import TokenWriter
from core.errors import ConfigError
from core.technique import technique
from datamodules.packing.block_checksums import CHECKSUMS, read_sums, sums_of, write_sums

_MOST = 1 << 31
_HELD, _STEP = 1 << 23, 1 << 20
"""Bytes of a chunk's tokens that stay in memory until its header, which lies before them, is known; and that are copied at once."""

_FORMATS = {"uint16": 5, "uint32": 6}
"""litdata's numbers of the types."""


@technique(
    paper="litdata's BinaryWriter and TokensLoader, github.com/Lightning-AI/litdata",
    offers=("token_store",),
    maturity="stable",
)
class TokenShards(TokenWriter):
    """Stores token ids in chunks of about `shard_bytes` and an index.json, the format of litdata's TokensLoader.

    Each document is one item: an array of uint16 if the vocabulary has at most 65,536 ids, else of
    uint32. The same documents give the same bytes, on any rank. Beside index.json, checksums.crc32 has a checksum of
    each block of 16 KiB, against which a block is held when a run first reads it; litdata does not need it.

    Args:
        shard_bytes: Size of a chunk, in bytes, below 2 GiB: offsets in a chunk are uint32. A longer
            document makes a longer chunk. The last chunk of each task is shorter; in the end, neighbours that
            fit into one chunk are joined. Memory, batches and where a run can resume do not depend on it. A chunk
            on object storage is one download.

    Raises:
        ConfigError: If `shard_bytes` is out of range, or there is nothing to write.

    Example:
        data:
          init_args:
            writer: {class_path: TokenShards, init_args: {shard_bytes: 536870912}}
    """

    def __init__(self, shard_bytes: int = 512 * 1024 * 1024) -> None:
        if not 0 < shard_bytes < _MOST:
            raise ConfigError(f"TokenShards: shard_bytes is {shard_bytes}; it is between 1 and {_MOST - 1}.")
        self.shard_bytes = shard_bytes

    @staticmethod
    def open(folder: Path) -> Any:
        """Returns the token ids of a folder, for random access; see `datamodules.packing.token_store.TokenStore`.

        Raises:
            ConfigError: If the folder is damaged.
        """
        from datamodules.packing.token_store import TokenStore

        return TokenStore(folder)

    def write(self, documents: Iterable[Sequence[int]], folder: Path, vocab_size: int) -> int:
        """Writes each document's ids in order; returns the number of tokens written."""
        dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        folder.mkdir(parents=True, exist_ok=True)
        chunks: list[dict[str, Any]] = []
        chunk: _Chunk | None = None
        for ids in documents:
            document = np.asarray(ids, dtype)
            if chunk and chunk.size + document.nbytes > self.shard_bytes:
                chunks.append(chunk.close())
                chunk = None
            chunk = chunk or _Chunk(folder / f"chunk-0-{len(chunks)}.bin", dtype.itemsize)
            chunk.add(document)
        if chunk:
            chunks.append(chunk.close())
        if not sum(chunk["dim"] for chunk in chunks):
            raise ConfigError(f"{folder}: there is no document to write.")
        index = {"chunks": chunks, "config": _config(dtype, self.shard_bytes)}
        write_sums(folder / CHECKSUMS, (sums_of(folder / chunk["filename"]) for chunk in chunks))
        (folder / "index.json").write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
        return sum(chunk["dim"] for chunk in chunks)

    def join(self, parts: Sequence[Path], folder: Path) -> dict[str, Path]:
        """Makes one folder of the chunks of several, numbered by part and chunk; writes one index.json.

        Successive chunks that fit into one are merged, so that tasks of any size give shards of about the requested
        size; all others are moved unchanged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        found, config = [], None
        for number, part in enumerate(parts):
            index = _index(part)
            config = index["config"]
            for count, chunk in enumerate(index["chunks"]):
                found.append(
                    chunk | {"filename": f"chunk-{number}-{count}.bin", "path": part / chunk["filename"]}
                )
        moved, chunks = {}, []
        groups = self._fitting(found)
        for group in groups:
            old, new = [chunk["path"] for chunk in group], folder / group[0]["filename"]
            chunks.append(_as_one(group))
            if len(group) == 1:
                moved[new.name] = old[0]
                if old[0].exists() or not new.exists():  # otherwise an earlier call has moved it
                    os.replace(old[0], new)
            elif not new.exists():
                _merge(old, group, new)
            for path in old:  # frees the room of what was merged
                path.unlink(missing_ok=True)
        with durable.replacing(folder / CHECKSUMS) as temporary:
            write_sums(temporary, _joined_sums(groups, folder))
        durable.write(folder / "index.json", json.dumps({"chunks": chunks, "config": config}, sort_keys=True))
        return moved

    def _fitting(self, chunks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Groups successive chunks that fit into one chunk."""
        groups: list[list[dict[str, Any]]] = []
        joined: dict[str, Any] = {}
        for chunk in chunks:
            if groups and (more := _as_one([joined, chunk]))["chunk_bytes"] <= self.shard_bytes:
                groups[-1].append(chunk)
                joined = more
            else:
                groups.append([chunk])
                joined = chunk
        return groups


class _Chunk:
    """A chunk that is being written; its tokens wait in a file without a name where they are many.

    Args:
        path: Of the chunk.
        itemsize: Bytes of a token.

    Attributes:
        size: Bytes of the tokens so far.
    """

    def __init__(self, path: Path, itemsize: int) -> None:
        self.path, self.itemsize, self.size = path, itemsize, 0
        self._sizes = array("Q")
        self._tokens = tempfile.SpooledTemporaryFile(_HELD, dir=str(path.parent))  # noqa: SIM115

    def add(self, document: np.ndarray) -> None:
        """Adds a document."""
        self._tokens.write(document.data)
        self._sizes.append(document.nbytes)
        self.size += document.nbytes

    def close(self) -> dict[str, Any]:
        """Writes the chunk; returns its entry of index.json."""
        sizes = np.frombuffer(self._sizes, np.uint64).astype(np.int64)
        if (end := 4 * (len(sizes) + 2) + self.size) >= 1 << 32:
            raise ConfigError(
                f"{self.path}: a document of {sizes.max():,} bytes of tokens is too long; cut it up."
            )
        with self._tokens, self.path.open("wb") as stream:
            stream.write(_header(sizes))
            self._tokens.seek(0)
            shutil.copyfileobj(self._tokens, stream, _STEP)
        tokens = self.size // self.itemsize
        return {"chunk_bytes": end, "chunk_size": len(sizes), "dim": tokens, "filename": self.path.name}


def _header(sizes: np.ndarray) -> bytes:
    """Returns what a chunk begins with: number of items, offset of each and of the end, as uint32.

    Args:
        sizes: Bytes of each item, int64.
    """
    offsets = 4 * (len(sizes) + 2) + np.concatenate([[0], np.cumsum(sizes)])
    return np.array([len(sizes), *offsets], np.uint32).tobytes()


def _config(dtype: np.dtype[Any], shard_bytes: int) -> dict[str, Any]:
    """Returns the config of litdata's BinaryWriter for arrays without a header per item; a test compares the two."""
    absent = (
        "chunk_size",
        "compression",
        "compression_batch_size",
        "compression_level",
        "encryption",
        "ipc_compression",
    )
    return dict.fromkeys(absent) | {
        "chunk_bytes": shard_bytes,
        "data_format": [f"no_header_numpy:{_FORMATS[dtype.name]}"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "item_loader": "TokensLoader",
        "types": "json",
    }


def _as_one(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry of index.json of a chunk with the items of several."""
    items = sum(chunk["chunk_size"] for chunk in chunks)
    content = sum(chunk["chunk_bytes"] - 4 * (chunk["chunk_size"] + 2) for chunk in chunks)
    sums = {
        "chunk_bytes": content + 4 * (items + 2),
        "chunk_size": items,
        "dim": sum(c["dim"] for c in chunks),
    }
    entry = {key: value for key, value in chunks[0].items() if key != "path"}
    return entry | sums


def _index(part: Path) -> dict[str, Any]:
    return json.loads((part / "index.json").read_text(encoding="utf-8"))


def _joined_sums(groups: list[list[dict[str, Any]]], folder: Path) -> Iterator[np.ndarray]:
    """Yields the checksums of the chunks of a joined folder: what was moved keeps those that it was written with."""

    @lru_cache(1)  # one after the other: a part's chunks follow each other
    def written(part: Path) -> dict[str, np.ndarray]:
        chunks = _index(part)["chunks"]
        read = read_sums(part, [chunk["chunk_bytes"] for chunk in chunks])
        sums = read[1] if read else []  # none: of an earlier version
        return {chunk["filename"]: found for chunk, found in zip(chunks, sums, strict=False)}

    for first, *others in groups:
        sums = None if others else written(first["path"].parent).get(first["path"].name)
        yield sums_of(folder / first["filename"]) if sums is None else sums


def _merge(old: list[Path], chunks: list[dict[str, Any]], new: Path) -> None:
    """Writes a chunk with the items of several."""
    counts = [chunk["chunk_size"] + 2 for chunk in chunks]
    headers = [np.fromfile(path, np.uint32, count) for path, count in zip(old, counts, strict=True)]
    sizes = np.concatenate([np.diff(header[1:]) for header in headers])
    with durable.replacing(new) as temporary, temporary.open("wb") as stream:
        stream.write(_header(sizes.astype(np.int64)))
        for path, header in zip(old, headers, strict=True):
            with path.open("rb") as part:
                part.seek(int(header[1]))
                shutil.copyfileobj(part, stream, _STEP)
