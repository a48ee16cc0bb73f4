"""What packing costs a rank in each step, which counts the rows of all groups of documents, and packs its own.

    python -m tests.benchmarks.best_fit

Which rows come next is known only when the rows before them are counted, and best-fit packing has no formula for their number.
So each rank counts the rows of the global batch by the lengths of all documents; it packs the groups that its own rows are of, and
reads their tokens. Prints CPU time of one step for some global batches, and the share that is of the time in which the rank
trains on its own rows, at 6,667 tokens/s of a GPU, as torchtitan publishes for 8B on H100. Documents have log-normal lengths of 730
tokens on average.
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
    """Returns CPU seconds of a step for counting rows, for the own ones, and about how many documents the rows have."""
    batches = BestFitBatches(
        tokens, sequence_length=LENGTH, batch_size=ROWS, rank=0, world_size=ranks, shuffle=True
    )
    cursor, counting, own = batches.cursor, [], []
    for _ in range(steps):
        begin = time.process_time()
        rows, cursor = batches.take(cursor, ROWS * ranks)
        middle = time.process_time()
        batches.read(rows, slice(0, ROWS))
        counting.append(middle - begin)
        own.append(time.process_time() - middle)
    documents = batches.epochs(cursor)["all"] * tokens.number_of_documents / steps
    return statistics.mean(counting), statistics.mean(own), round(documents)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print("| ranks | tokens of a step | documents | counting rows, ms | own rows, ms | share of a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        tokens = store(Path(folder, "tokens"), options.documents)
        for ranks in options.ranks:
            counting, own, documents = measure(tokens, ranks, options.steps)
            share = (counting + own) / (LENGTH * ROWS / RATE)
            print(
                f"| {ranks:,} | {LENGTH * ROWS * ranks:,} | {documents:,} | {1e3 * counting:.2f} | {1e3 * own:.2f} | "
                f"{100 * share:.2f}% |",
                flush=True,
            )


if __name__ == "__main__":
    main()
