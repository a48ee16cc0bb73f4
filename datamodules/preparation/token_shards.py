"""Stores token ids in litdata's chunk format."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.contracts import TokenWriter
from core.errors import ConfigError
from core.files import durable
from core.technique import technique

_MOST = 1 << 31


@technique(
    paper="litdata's BinaryWriter and TokensLoader, github.com/Lightning-AI/litdata", maturity="stable"
)
class TokenShards(TokenWriter):
    """Chunks of about `shard_bytes` and an index.json, which litdata's TokensLoader reads too.

    Every document is one item, a run of uint16 where the vocabulary has at most 65,536 ids, else of
    uint32. The same documents give the same bytes, whatever rank of a launch writes them.

    Args:
        shard_bytes: Size of a chunk, in bytes, below 2 GiB: offsets in a chunk are uint32. A longer
            document makes a longer chunk. The last chunk of each piece of the text is shorter, but no two
            neighbours are so short that they would fit into one: they are joined in the end.

    Raises:
        ConfigError: If `shard_bytes` is out of range, or there is nothing to write.

    Example:
        data:
          init_args:
            writer: {class_path: TokenShards, init_args: {shard_bytes: 67108864}}
    """

    def __init__(self, shard_bytes: int = 64 * 1024 * 1024) -> None:
        if not 0 < shard_bytes < _MOST:
            raise ConfigError(
                f"TokenShards: shard_bytes is {shard_bytes}; it lies between 1 and {_MOST - 1}."
            )
        self.shard_bytes = shard_bytes

    def write(self, documents: Iterable[Sequence[int]], folder: Path, vocab_size: int) -> int:
        """Writes each document's ids in order; returns the number of tokens written."""
        from litdata.streaming.item_loader import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        class Writer(BinaryWriter):
            # litdata asks the environment: under torchrun it would name chunks after the rank.
            rank = 0

        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        writer = Writer(str(folder), chunk_bytes=self.shard_bytes, item_loader=TokensLoader())
        tokens = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "An item was larger than the target chunk size")
            for index, ids in enumerate(documents):
                writer.add_item(index, np.asarray(ids, dtype))
                tokens += len(ids)
            writer.done()
        if not tokens:
            raise ConfigError(f"{folder}: there is no document to write.")
        # Not writer.merge(): it waits for the index of every rank, and puts the time of day into it.
        os.replace(folder / "0.index.json", folder / "index.json")
        return tokens

    def join(self, parts: Sequence[Path], folder: Path) -> dict[str, Path]:
        """Makes one folder of the chunks of several, numbered by part and chunk; writes one index.json.

        Successive chunks that fit into one become one, so that pieces of any size give shards of about the size
        that was asked for; all others are moved as they are.
        """
        folder.mkdir(parents=True, exist_ok=True)
        found, config = [], None
        for number, part in enumerate(parts):
            index = json.loads((part / "index.json").read_text(encoding="utf-8"))
            config = index["config"]
            for count, chunk in enumerate(index["chunks"]):
                found.append(
                    chunk | {"filename": f"chunk-{number}-{count}.bin", "path": part / chunk["filename"]}
                )
        moved, chunks = {}, []
        for group in self._fitting(found):
            old, new = [chunk.pop("path") for chunk in group], folder / group[0]["filename"]
            chunks.append(_as_one(group))
            if len(group) == 1:
                moved[new.name] = old[0]
                if old[0].exists() or not new.exists():  # else an earlier call has moved it
                    os.replace(old[0], new)
            elif not new.exists():
                _merge(old, group, new)
            for path in old:  # what is in the new one takes no room twice
                path.unlink(missing_ok=True)
        durable.write(folder / "index.json", json.dumps({"chunks": chunks, "config": config}, sort_keys=True))
        return moved

    def _fitting(self, chunks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Returns the chunks in groups of successive ones that fit into one together."""
        groups: list[list[dict[str, Any]]] = []
        for chunk in chunks:
            if groups and _as_one([*groups[-1], chunk])["chunk_bytes"] <= self.shard_bytes:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return groups


def _as_one(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what index.json says of a chunk that holds the items of several."""
    items = sum(chunk["chunk_size"] for chunk in chunks)
    content = sum(chunk["chunk_bytes"] - 4 * (chunk["chunk_size"] + 2) for chunk in chunks)
    sums = {
        "chunk_bytes": content + 4 * (items + 2),
        "chunk_size": items,
        "dim": sum(c["dim"] for c in chunks),
    }
    return chunks[0] | sums


def _merge(old: list[Path], chunks: list[dict[str, Any]], new: Path) -> None:
    """Writes a chunk with the items of several: header (number of items, offset of each and of the end), tokens."""
    raw = [path.read_bytes() for path in old]
    headers = [np.frombuffer(r, np.uint32, c["chunk_size"] + 2) for r, c in zip(raw, chunks, strict=True)]
    lengths = np.concatenate([np.diff(header[1:]) for header in headers])
    begin = 4 * (len(lengths) + 2)
    offsets = begin + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    header = np.array([len(lengths), *offsets], np.uint32).tobytes()
    durable.write(new, b"".join([header, *(r[int(h[1]) :] for r, h in zip(raw, headers, strict=True))]))
