"""RepeatedLines on documents with planted boilerplate: MB per CPU-second of each step, peak memory, and what is removed.

    python -m tests.benchmarks.repeated_lines

Pages of 30 lines of their own, of 4 to 25 words, and 3 of 2,000 banners, chosen with Zipf's weights: the commonest is in a third of the
pages. Two sizes, each in a process of its own; a process holds one batch of pages at a time. `reduce` is also measured on
records of 10 and 50 million lines, that are on disk.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow

from datamodules.preparation.duplicates import line_records
from datamodules.preparation.transforms.repeated_lines import RepeatedLines
from tests.benchmarks.duplicates import peak
from toolkit.arrow_columns import strings

PAGES, BATCH, PIECES, BANNERS = (10_000, 40_000), 500, 8, 2000
RECORDS = (10_000_000, 50_000_000)


def pages(number: int, piece: int) -> Iterator[pyarrow.RecordBatch]:
    """Yields the pages of a piece; the same ones each time."""
    rng, words = random.Random(piece), vocabulary()
    banners = [" ".join(random.Random(-n - 1).choices(words, k=12)) + f" {n:b}".replace("0", "a").replace("1", "b")
               for n in range(BANNERS)]  # fmt: skip
    weights = [1 / (place + 1) for place in range(BANNERS)]
    for begin in range(piece * number // PIECES, (piece + 1) * number // PIECES, BATCH):
        texts, names = [], []
        for page in range(begin, min(begin + BATCH, (piece + 1) * number // PIECES)):
            lines = [" ".join(rng.choices(words, k=rng.randint(4, 25))).capitalize() + "." for _ in range(30)]
            lines[::12] = rng.choices(banners, weights, k=3)
            texts.append("\n".join(lines))
            names.append(f"file:{page}")
        yield pyarrow.record_batch(
            [strings(column) for column in (texts, ["web"] * len(names), names)], ["text", "source", "id"]
        )


def vocabulary() -> list[str]:
    """Returns 50,000 words."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(50_000)]


class Clock:
    """CPU seconds in what is iterated over, to be left out: pages are made while they are mapped."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0

    def left_out(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Yields the batches."""
        while True:
            begin = time.process_time()
            batch = next(batches, None)
            self.seconds += time.process_time() - begin
            if batch is None:
                return
            self.bytes += batch["text"].nbytes
            yield batch


def whole(number: int) -> None:
    """Maps, reduces and applies; prints the figures."""
    transform, seconds = RepeatedLines(), {}
    with tempfile.TemporaryDirectory() as name:
        folder, clock, begin = Path(name), Clock(), time.process_time()
        findings = [folder / f"{piece:06}" for piece in range(PIECES)]
        for piece, path in enumerate(findings):
            transform.map(clock.left_out(pages(number, piece)), path)
        seconds["map"] = time.process_time() - begin - clock.seconds
        size, noted = clock.bytes, sum(path.stat().st_size for path in findings)
        begin = time.process_time()
        transform.reduce(findings, folder / "conclusion")
        seconds["reduce"] = time.process_time() - begin
        clock, begin = Clock(), time.process_time()
        transform.load(folder / "conclusion")
        for piece in range(PIECES):
            for batch in clock.left_out(pages(number, piece)):
                transform.apply(batch, lambda reason, rows: None)
        seconds["apply"] = time.process_time() - begin - clock.seconds
    speeds = ", ".join(f"{step} {size / 1e6 / taken:,.1f}" for step, taken in seconds.items())
    removed = transform.take_counts()["lines removed"]
    print(
        f"{number:,} pages, {size / 1e6:,.1f} MB: MB per CPU-second: {speeds}, "
        f"all {size / 1e6 / sum(seconds.values()):,.1f}; peak {peak() / 2**20:,.0f} MiB; {noted / 1e6:,.1f} MB noted; "
        f"{removed:,} lines removed of {3 * number:,} planted"
    )


def records(number: int) -> None:
    """Reduces records of lines of which every tenth is one of a thousand, and prints the figures."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name), line_records.CHUNK
        findings = [folder / f"{piece:06}" for piece in range(0, number, step)]
        for piece, path in enumerate(findings):
            lines = rng.integers(0, 1 << 64, min(step, number - piece * step), np.uint64)
            lines[::10] = np.arange(len(lines[::10]), dtype=np.uint64) % 1000 << np.uint64(50)
            documents = lines[:: len(lines) // 80 or 1]
            sizes = np.full(len(documents), len(lines) // len(documents))
            sizes[-1] += len(lines) - sizes.sum()
            line_records.write_records([(lines, sizes, documents)], path)
        before, begin = peak(), time.process_time()
        RepeatedLines().reduce(findings, folder / "conclusion")
        taken, found = time.process_time() - begin, (folder / "conclusion").stat().st_size // 16
    print(
        f"{number:,} lines: peak {peak() / 2**20:,.0f} MiB ({before / 2**20:,.0f} before), {taken:.1f} CPU seconds, "
        f"{found:,} of 1,000 planted lines found"
    )


def main(words: list[str]) -> None:
    """Runs what the command line says."""
    steps = {"whole": whole, "records": records}
    if words:
        steps[words[0]](int(words[1]))
        return
    for step, numbers in (("whole", PAGES), ("records", RECORDS)):
        for number in numbers:
            command = [sys.executable, "-m", "tests.benchmarks.repeated_lines", step, str(number)]
            print(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
