"""Prints what the transforms of configs/defaults.yaml, and the report's figures of diversity, add to a preparation.

    python -m tests.benchmarks.preparation_extras --rounds 5

Each figure is the median over rounds in which the kinds take turns, each in a process of its own, in one thread, from text to a
finished folder, with what the process takes to start left out. `bare` and `cleaned` are what `fit` does, without and with the
transforms; `reported` and `measured` are what `prepare` does, without and with the figures of diversity.
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

KINDS = ("bare", "cleaned", "reported", "measured")


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--megabytes", type=float, default=0, help="of files of words; 0: the quickstart's text"
    )
    parser.add_argument("--files", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, name = "python-docs", "python-docs"
        if options.megabytes:
            source, name = f"{folder}/corpus", f"{options.megabytes:g} MB in {options.files:,} files"
            write_corpus(Path(source), int(options.megabytes * 1e6), options.files)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds):
            for kind in sorted(KINDS, reverse=bool(number % 2)):
                found[kind].append(measured(kind, source, f"{folder}/{kind}-{number}"))
    for kind in KINDS:
        seconds, cpu = (statistics.median(column) for column in zip(*found[kind], strict=True))
        print(f"{name:24} {kind:9} {seconds:6.2f} s {cpu:6.2f} CPU s")


def measured(kind: str, source: str, output: str) -> tuple[float, float]:
    """Returns seconds and CPU seconds of one preparation."""
    command = [sys.executable, "-m", "tests.benchmarks.preparation_extras", "--one", kind, source, output]
    done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    seconds, cpu = map(float, done.stdout.split())
    return seconds, cpu


def one(kind: str, source: str, output: str) -> None:
    """Prepares, and prints seconds and CPU seconds."""
    from datamodules.preparation import token_preparation
    from datamodules.preparation.readers.text_documents import TextDocuments
    from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
    from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
    from datamodules.preparation.transforms.normalise import Normalise
    from datamodules.preparation.writers.token_shards import TokenShards
    from toolkit.prepared import PLAN

    transforms = [] if kind == "bare" else [Normalise(form=None, whitespace=False), ExactDuplicates()]
    preparation = token_preparation.TokenPreparation(
        TextDocuments(source), BPETokenizer(2048), TokenShards(), transforms=transforms
    )
    if kind == "reported":
        token_preparation.sampled_share = lambda source_bytes: 0.0  # type: ignore[assignment]
    folder = Path(output)
    folder.mkdir()
    begin, cpu = time.perf_counter(), time.process_time()
    if kind in ("bare", "cleaned"):
        preparation.cached(folder, "text")
    else:
        (folder / PLAN).touch()
        preparation.run(folder, "text")
    print(time.perf_counter() - begin, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main()
