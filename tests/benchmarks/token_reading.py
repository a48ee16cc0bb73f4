"""Tokens per second from stored tokens, beside random crops of a memory map; and what else the stream costs.

    python -m tests.benchmarks.token_reading

Both sides read the same 100 M uint16 tokens with 0 workers, in turn, and hand out int64 inputs and labels.
Then: seconds to the first batch, and the growth of the resident set while an epoch is read.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.token_loader import TokenLoader
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.preparation.token_shards import TokenShards

TOKENS, DOCUMENT, BATCH, ROUNDS = 100_000_000, 1000, 8, 7
SECONDS = 0.5


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
    """Writes the tokens and prints a line for each length."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16)
        tokens.tofile(root / "tokens.bin")
        TokenShards().write(tokens.reshape(-1, DOCUMENT), root / "train", 50_000)
        del tokens
        print(
            "row tokens  random crops  Concatenate  ratio  masked  ratio  BestFit  ratio   (million tokens/s)"
        )
        for length in (256, 1024, 2048):
            options: dict[str, Any] = {"sequence_length": length, "batch_size": BATCH, "shuffle": True}
            sides = [random_crops(root / "tokens.bin", length)]
            for packing in (Concatenate(), Concatenate(mask_documents=True), BestFit()):
                sides.append(
                    forever(lambda p=packing, o=options: TokenLoader(p.batches(root / "train", **o)))
                )
            rounds = [[rate(side) for side in sides] for _ in range(ROUNDS)]
            found = [statistics.median(column) for column in zip(*rounds, strict=True)]
            ratios = [statistics.median(r[k] / r[0] for r in rounds) for k in range(len(sides))]
            print(
                f"{length:>10}  {found[0]:>12.0f}  {found[1]:>11.0f}  {ratios[1]:>5.2f}  {found[2]:>6.0f}"
                f"  {ratios[2]:>5.2f}  {found[3]:>7.0f}  {ratios[3]:>5.2f}",
                flush=True,
            )
        begin = time.perf_counter()
        loader = TokenLoader(
            Concatenate().batches(root / "train", sequence_length=2048, batch_size=8, shuffle=True)
        )
        next(iter(loader))
        print(f"first batch: {time.perf_counter() - begin:.3f} s")
        before = private_mib()
        for _ in loader:
            pass
        print(f"an epoch of {TOKENS:,} tokens: private memory {private_mib() - before:+.1f} MiB")


def private_mib() -> float:
    """Returns the process's memory without mapped files, in MiB; the peak where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("RssAnon:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
