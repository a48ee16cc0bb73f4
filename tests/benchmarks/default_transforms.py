"""Prints what the transforms of configs/defaults.yaml add to the preparation of a run.

    python -m tests.benchmarks.default_transforms --rounds 5

Each figure is the median over rounds in which preparations with and without them take turns, each in a process of its
own, from text to a folder of the cache, with what the process takes to start left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.prepare_cost import HOUSE, write_corpus


def main() -> None:
    """Prints a line for the quickstart's text and one for a folder of files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"), int(options.megabytes * 1e6), options.files)
        names = {
            "python-docs": "python-docs",
            f"{folder}/corpus": f"{options.megabytes:g} MB, {options.files:,} files",
        }
        for source, name in names.items():
            found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
            for number in range(options.rounds):
                for kind in sorted(found, reverse=bool(number % 2)):
                    found[kind].append(measured(kind, source, f"{folder}/cache-{kind}-{number}-{len(name)}"))
            for kind, figures in found.items():
                seconds, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
                print(f"{name:22} {kind:8} {seconds:6.2f} s {cpu:6.2f} CPU s")


def measured(kind: str, source: str, cache: str) -> tuple[float, float]:
    """Returns seconds and CPU seconds of one preparation."""
    command = [sys.executable, "-m", "tests.benchmarks.default_transforms", "--one", kind, source, cache]
    done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    seconds, cpu = map(float, done.stdout.split())
    return seconds, cpu


def one(kind: str, source: str, cache: str) -> None:
    """Prepares, and prints seconds and CPU seconds."""
    from core.pretrain_datamodule import PretrainDataModule
    from datamodules.packing.concatenate import Concatenate
    from datamodules.preparation.readers.text_documents import TextDocuments
    from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
    from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
    from datamodules.preparation.transforms.normalise import Normalise
    from datamodules.preparation.writers.token_shards import TokenShards

    transforms = [Normalise(form=None, whitespace=False), ExactDuplicates()] if kind == "with" else []
    data = PretrainDataModule(
        TextDocuments,
        BPETokenizer(2048),
        TokenShards(),
        Concatenate(),
        source=source,
        cache_dir=cache,
        transforms=transforms,
    )
    begin, cpu = time.perf_counter(), time.process_time()
    data.prepare_data()
    print(time.perf_counter() - begin, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main()
