"""What it costs to hold tokens against their checksums when they are first read.

    python -m tests.benchmarks.block_checksums

One folder with checksums.crc32 and the same without it are read in turn, row by row in random order: a first pass, in which each
block is checked once, and a second one. The last column is the share of training time that the checks of the first pass take
where training reads so many tokens in a second, on one reader. The last line has rows of which each is in a block of its own, as
when the first rows of a very large folder are read.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from datamodules.packing.block_checksums import BLOCK_BYTES, CHECKSUMS
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards

TOKENS, DOCUMENT, ROUNDS = 50_000_000, 1000, 5
PER_SECOND = 100_000
"""Tokens of a small model on one H100, several times what larger ones take."""


def main() -> None:
    """Prints a line for each length of rows."""
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16).reshape(-1, DOCUMENT)
    with tempfile.TemporaryDirectory() as root:
        with_sums, without = Path(root, "with"), Path(root, "without")
        TokenShards().write(tokens, with_sums, 50_000)
        without.mkdir()
        for path in with_sums.iterdir():
            if path.name != CHECKSUMS:
                os.link(path, without / path.name)
        for folder in (with_sums, without):
            opened = statistics.median(seconds_to_open(folder) for _ in range(ROUNDS))
            print(f"{folder.name:>8} checksums: opened in {opened * 1e3:.2f} ms")
        print(
            "row tokens   first pass: with, without, us/row   second pass: with, without   share of first pass at "
            f"{PER_SECOND:,} tokens/s"
        )
        for length, apart in (
            (256, 256),
            (1024, 1024),
            (4096, 4096),
            (16384, 16384),
            (256, BLOCK_BYTES // 2),
        ):
            rounds = [
                [*passes(with_sums, length, apart), *passes(without, length, apart)] for _ in range(ROUNDS)
            ]
            first, second, bare, bare_again = (
                statistics.median(column) for column in zip(*rounds, strict=True)
            )
            share = (first - bare) / (length / PER_SECOND)
            print(
                f"{length:>10}   {first * 1e6:>12.1f} {bare * 1e6:>8.1f} {second * 1e6:>28.1f} "
                f"{bare_again * 1e6:>8.1f} {share:>20.4%}",
                flush=True,
            )


def seconds_to_open(folder: Path) -> float:
    """Returns how long opening takes."""
    begin = time.perf_counter()
    TokenStore(folder)
    return time.perf_counter() - begin


def passes(folder: Path, length: int, apart: int) -> list[float]:
    """Returns seconds for each row, of a first and a second pass over all tokens in random order."""
    store, found = TokenStore(folder), []
    rows = (np.random.default_rng(1).permutation((len(store) - 1) // apart) * apart).tolist()
    inputs, labels = np.empty((2, length), np.int64)
    for _ in range(2):
        begin = time.perf_counter()
        for row in rows:
            store.copy(row, inputs, labels)
        found.append((time.perf_counter() - begin) / len(rows))
    return found


if __name__ == "__main__":
    main()
