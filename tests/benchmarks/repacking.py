"""Seconds that a `take` costs after a change of length inside a group of documents, for packings of whole documents.

    python -m tests.benchmarks.repacking

2,048 documents (one group) of 20 to 20,000 tokens, log-normal; the length goes through 256, 128, 512 and 64, four
rows each time. Then the same position is resumed, as from a checkpoint.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from datamodules.packing.best_fit import BestFit
from datamodules.packing.padded_documents import PaddedDocuments
from datamodules.preparation.writers.token_shards import TokenShards

LENGTHS, CHANGES, ROWS = (256, 128, 512, 64), 64, 4


def main() -> None:
    """Prints a line for each packing."""
    sizes = np.random.default_rng(0).lognormal(6, 1.2, 2048).astype(int).clip(20, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        TokenShards().write([np.arange(size) % 1000 for size in sizes], Path(folder), 1000)
        for packing in (BestFit(), PaddedDocuments()):
            order = {"sequence_length": LENGTHS[0], "batch_size": ROWS, "shuffle": True}
            batches, seconds = packing.batches(Path(folder), **order), []
            cursor = batches.cursor
            for number in range(CHANGES):
                batches.sequence_length = LENGTHS[number % len(LENGTHS)]
                begin, before = time.perf_counter(), cursor
                cursor = batches.take(cursor, ROWS)[1]
                seconds.append(time.perf_counter() - begin)
            resumed = packing.batches(Path(folder), **order | {"sequence_length": batches.sequence_length})
            begin = time.perf_counter()
            assert resumed.take(before, ROWS)[1] == cursor
            print(
                f"{type(packing).__name__}: {statistics.median(seconds):.3f} s a change (median), {max(seconds):.3f} s "
                f"at most, {sum(seconds):.1f} s for {CHANGES}; resuming there {time.perf_counter() - begin:.1f} s"
            )


if __name__ == "__main__":
    main()
