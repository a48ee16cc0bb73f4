"""Tokens per second from stored tokens, beside random crops of a memory map; and what else the stream costs.

    python -m tests.benchmarks.token_reading

Both sides read the same 100 M uint16 tokens with 0 workers, in turn, and hand out int64 inputs and labels.
Then: seconds to the first batch, and how memory grows while 100 M tokens are read from one folder, and as a
mixture of two. Last: the share of the quickstart's training time that it waits for batches.

    python -m tests.benchmarks.token_reading wait        # this alone
"""

from __future__ import annotations

import io
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.__main__ import main as command_line
from core.data.token_loader import TokenLoader
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.mixture import MixedBatches
from datamodules.preparation.writers.token_shards import TokenShards

TOKENS, DOCUMENT, BATCH, ROUNDS = 100_000_000, 1000, 8, 7
SECONDS = 0.5
SOURCES = {"web": 0.7, "code": 0.3}
"""Of the mixture: their shares of the rows, and of the tokens that they hold."""

WARM, STEPS = 20, 60


def random_crops(path: Path, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """nanoGPT's loader: a crop at a random place for each row."""
    tokens = np.memmap(path, np.uint16, mode="r")
    while True:
        starts = torch.randint(len(tokens) - length, (BATCH,)).tolist()
        rows = [tokens[start : start + length + 1].astype(np.int64) for start in starts]
        yield {
            "input_ids": torch.stack([torch.from_numpy(row[:-1]) for row in rows]),
            "labels": torch.stack([torch.from_numpy(row[1:]) for row in rows]),
        }


def rate(batches: Iterator[dict[str, torch.Tensor]]) -> float:
    """Returns million tokens per second."""
    begin, tokens = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        for batch in islice(batches, 20):
            tokens += batch["input_ids"].numel()
    return tokens / (time.perf_counter() - begin) / 1e6


def forever(make: Callable[[], TokenLoader]) -> Iterator[dict[str, torch.Tensor]]:
    """Yields pass after pass."""
    loader = make()
    while True:
        yield from loader


def main() -> None:
    """Prints all figures."""
    if "wait" not in sys.argv[1:]:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            read(Path(folder))
        torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        wait(Path(folder))


def read(root: Path) -> None:
    """Writes the tokens and prints rates, first batches and memory."""
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16)
    tokens.tofile(root / "tokens.bin")
    documents = tokens.reshape(-1, DOCUMENT)
    TokenShards().write(documents, root / "train", 50_000)
    for name, share in SOURCES.items():
        TokenShards().write(documents[: int(share * len(documents))], root / name, 50_000)
    del tokens, documents
    rates(root)
    options: dict[str, Any] = {"sequence_length": 2048, "batch_size": BATCH, "shuffle": True}

    def mixture() -> MixedBatches:
        parts = {name: Concatenate().batches(root / name, **options) for name in SOURCES}
        return MixedBatches(parts, SOURCES)

    for what, make in {
        "one folder": lambda: Concatenate().batches(root / "train", **options),
        "a mixture of two": mixture,
    }.items():
        begin = time.perf_counter()
        batches = iter(forever(lambda make=make: TokenLoader(make())))
        next(batches)
        first = time.perf_counter() - begin
        before = memory_mib()
        for _ in islice(batches, TOKENS // (BATCH * 2048)):
            pass
        anonymous, resident = (after - was for after, was in zip(memory_mib(), before, strict=True))
        print(
            f"{what}: first batch {first:.3f} s; over {TOKENS:,} tokens private memory {anonymous:+.1f} MiB, "
            f"resident set with mapped files {resident:+.1f} MiB",
            flush=True,
        )


def rates(root: Path) -> None:
    """Prints a line for each length."""
    print("row tokens  random crops  Concatenate  ratio  masked  ratio  BestFit  ratio   (million tokens/s)")
    for length in (256, 1024, 2048):
        options: dict[str, Any] = {"sequence_length": length, "batch_size": BATCH, "shuffle": True}
        sides = [random_crops(root / "tokens.bin", length)]
        for packing in (Concatenate(), Concatenate(mask_documents=True), BestFit()):
            sides.append(forever(lambda p=packing, o=options: TokenLoader(p.batches(root / "train", **o))))
        rounds = [[rate(side) for side in sides] for _ in range(ROUNDS)]
        found = [statistics.median(column) for column in zip(*rounds, strict=True)]
        ratios = [statistics.median(r[k] / r[0] for r in rounds) for k in range(len(sides))]
        print(
            f"{length:>10}  {found[0]:>12.0f}  {found[1]:>11.0f}  {ratios[1]:>5.2f}  {found[2]:>6.0f}"
            f"  {ratios[2]:>5.2f}  {found[3]:>7.0f}  {ratios[3]:>5.2f}",
            flush=True,
        )


def memory_mib() -> tuple[float, float]:
    """Returns the process's memory without and with mapped files, in MiB; its peak where the system tells no more."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        anonymous, resident = (
            int(status.split(f"{name}:")[1].split()[0]) / 1024 for name in ("RssAnon", "VmRSS")
        )
    except (OSError, IndexError):
        anonymous = resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return anonymous, resident


def wait(root: Path) -> None:
    """Trains the quickstart's network for a few steps and prints what share of them passes in next(dataloader)."""
    begun: list[float] = []
    waited: list[float] = []
    batches = TokenLoader.__iter__

    def timed(loader: TokenLoader) -> Iterator[dict[str, torch.Tensor]]:
        iterator = batches(loader)
        while True:
            begun.append(time.perf_counter())
            batch = next(iterator, None)
            waited.append(time.perf_counter() - begun[-1])
            if batch is None:
                return
            yield batch

    os.environ["XDG_CACHE_HOME"] = str(root)
    TokenLoader.__iter__ = timed  # type: ignore[method-assign]
    for packing in ("Concatenate", "BestFit"):
        begun.clear()
        waited.clear()
        run = [f"--trainer.default_root_dir={root / packing}", f"--data.packing={packing}"]
        short = [
            f"--trainer.max_steps={STEPS + WARM}",
            "--trainer.limit_val_batches=0",
            "--callbacks.-TextSamples",
        ]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            code = command_line(["fit", "--config=quickstart", *run, *short])
        steps = np.diff(begun[WARM:])
        each = np.array(waited[WARM : WARM + len(steps)])
        print(
            f"quickstart with {packing} (exit code {code}), {len(steps)} steps: {steps.mean() * 1e3:.1f} ms a step, of which "
            f"waiting for the batch {each.mean() * 1e3:.3f} ms = {each.sum() / steps.sum():.2%} "
            f"(median {np.median(each) * 1e3:.3f} ms, most {each.max() * 1e3:.3f} ms)",
            flush=True,
        )


if __name__ == "__main__":
    main()
