"""Stores token ids in litdata's chunk format."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from core import durable
from core.contracts import TokenWriter
from core.errors import ConfigError
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
            document makes a longer chunk; the last one of each piece of the text is shorter.

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
        """Moves the chunks of several folders into one, numbered by part and chunk; writes one index.json."""
        folder.mkdir(parents=True, exist_ok=True)
        moved, chunks, config = {}, [], None
        for number, part in enumerate(parts):
            index = json.loads((part / "index.json").read_text(encoding="utf-8"))
            config = index["config"]
            for count, chunk in enumerate(index["chunks"]):
                name = f"chunk-{number}-{count}.bin"
                old, new = part / chunk["filename"], folder / name
                if old.exists() or not new.exists():  # else an earlier call has moved it
                    os.replace(old, new)
                moved[name] = old
                chunks.append(chunk | {"filename": name})
        durable.write(folder / "index.json", json.dumps({"chunks": chunks, "config": config}, sort_keys=True))
        return moved
