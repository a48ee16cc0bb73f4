"""What packing costs a rank in each step, of which it reads its own rows alone: lengths of all, tokens of its own.

    python -m tests.benchmarks.best_fit

Best-fit packing needs the lengths of all documents that are packed together: which row comes next, and how many there are, is
known only when all are placed. So each rank packs the lengths of the global batch, and reads the tokens of its own rows. Prints
CPU time of one step for some global batches, and the share that is of the time in which the rank trains on its own rows, at
6,667 tokens/s of a GPU, as torchtitan publishes for 8B on H100. Documents have log-normal lengths of 730 tokens on average.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.packing.best_fit import BestFitBatches
from datamodules.packing.token_store import TokenStore
from datamodules.preparation.writers.token_shards import TokenShards

RATE = 6_667
"""Tokens per second of a GPU."""

LENGTH, ROWS = 8192, 2
"""Row length, and rows of a rank."""


def store(folder: Path, documents: int) -> TokenStore:
    """Writes documents of tokens that do not matter."""
    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(6.1, 1.0, documents).astype(int), 8, 100_000)
    written: Any = (np.zeros(size, dtype=np.uint16) for size in sizes)
    TokenShards().write(written, folder, vocab_size=1 << 16)
    return TokenStore(folder)


def measure(tokens: TokenStore, ranks: int, steps: int) -> tuple[float, float, int]:
    """Returns CPU seconds of a step for rows, for reading the own ones, and the documents in the rows."""
    batches = BestFitBatches(
        tokens, sequence_length=LENGTH, batch_size=ROWS, rank=0, world_size=ranks, shuffle=True
    )
    cursor, packing, reading, found = batches.cursor, [], [], 0
    for _ in range(steps):
        begin = time.process_time()
        rows, cursor = batches.take(cursor, ROWS * ranks)
        middle = time.process_time()
        batches.read(rows, slice(0, ROWS))
        packing.append(middle - begin)
        reading.append(time.process_time() - middle)
        found += sum(map(len, rows))
    return statistics.mean(packing), statistics.mean(reading), found // steps


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print("| ranks | tokens of a step | documents | packing, ms | reading own rows, ms | share of a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        tokens = store(Path(folder, "tokens"), options.documents)
        for ranks in options.ranks:
            packing, reading, documents = measure(tokens, ranks, options.steps)
            share = packing / (LENGTH * ROWS / RATE)
            print(
                f"| {ranks:,} | {LENGTH * ROWS * ranks:,} | {documents:,} | {1e3 * packing:.2f} | {1e3 * reading:.2f} | "
                f"{100 * share:.2f}% |",
                flush=True,
            )


if __name__ == "__main__":
    main()
