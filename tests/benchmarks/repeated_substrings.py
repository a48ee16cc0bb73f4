"""RepeatedSubstrings beside RepeatedLines and NearDuplicates: MB per CPU-second of each step, peak memory, what is removed.

    python -m tests.benchmarks.repeated_substrings

Two corpora of 60 MB, in batches of 500 documents. Prose: pages of random words, of which a fifth has one of 500 passages of 40 to 150 words
somewhere inside of a line. Sources: the Python files of the installed packages. Each transform in a process of its own, in
turns; the time in which documents are made or read is left out. Then RepeatedSubstrings on 15, 60 and 240 MB of prose.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow

from core.contracts import Transform
from tests.benchmarks.duplicates import peak
from tests.benchmarks.repeated_lines import Clock, vocabulary
from toolkit.arrow_columns import strings

BYTES, BATCH, PIECES, PASSAGES, ROUNDS = 60_000_000, 500, 8, 500, 2
WORDS = 400
"""Words of a page, 2,500 bytes."""


def prose(size: int) -> Iterator[str]:
    """Yields pages until they have so many bytes; the same ones each time."""
    rng, words = random.Random(0), vocabulary()
    passages = [" ".join(rng.choices(words, k=rng.randint(40, 150))) for _ in range(PASSAGES)]
    while size > 0:
        some = rng.choices(words, k=WORDS)
        if rng.random() < 0.2:
            some.insert(rng.randrange(WORDS), rng.choice(passages))
        text = "\n".join(" ".join(some[at : at + 20]) for at in range(0, WORDS, 20))
        yield text
        size -= len(text)


def sources(size: int) -> Iterator[str]:
    """Yields Python files of the installed packages, in the order of their names."""
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_bytes().decode(errors="ignore")
        if text.strip() and size > 0:
            yield text
            size -= len(text.encode())


CORPORA = {"prose": prose, "sources": sources}


def batches(texts: Iterator[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yields record batches of texts."""
    held, number = list[str](), 0
    for text in texts:
        held.append(text)
        if len(held) == BATCH:
            yield batch(held, number)
            held, number = [], number + BATCH
    if held:
        yield batch(held, number)


def batch(texts: list[str], number: int) -> pyarrow.RecordBatch:
    """Returns a record batch of texts whose ids begin at a number."""
    names = [f"file:{number + row}" for row in range(len(texts))]
    return pyarrow.record_batch(
        [strings(column) for column in (texts, ["source"] * len(texts), names)], ["text", "source", "id"]
    )


def transform_named(name: str) -> Transform:
    """Returns a transform with its defaults."""
    from core import catalog

    return catalog.find(name, "data").load()()


def whole(name: str, corpus: str, size: int) -> dict[str, Any]:
    """Maps, reduces and applies; returns the figures."""
    transform, seconds = transform_named(name), {}
    with tempfile.TemporaryDirectory() as folder:
        findings, conclusion = [Path(folder) / "000000"], Path(folder) / "conclusion"
        clock, begin = Clock(), time.process_time()
        transform.map(clock.left_out(batches(CORPORA[corpus](size))), findings[0])
        seconds["map"] = time.process_time() - begin - clock.seconds
        noted, taken = findings[0].stat().st_size, clock.bytes
        begin = time.process_time()
        transform.reduce(findings, conclusion)
        seconds["reduce"] = time.process_time() - begin
        transform.load(conclusion)
        clock, begin, left = Clock(), time.process_time(), 0
        for some in clock.left_out(batches(CORPORA[corpus](size))):
            left += transform.apply(some, lambda *_: None)["text"].nbytes
        seconds["apply"] = time.process_time() - begin - clock.seconds
    seconds["all"] = sum(seconds.values())
    speeds = {step: taken / 1e6 / one for step, one in seconds.items()}
    return {
        "MB": taken / 1e6,
        **speeds,
        "MiB": peak() / 2**20,
        "noted": noted / taken,
        "gone": 1 - left / taken,
    }


def line(name: str, corpus: str, size: int) -> str:
    """Returns a line of the table: the better of some runs by each speed, the larger by memory."""
    words = [sys.executable, "-m", "tests.benchmarks.repeated_substrings", name, corpus, str(size)]
    runs = [
        json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        for _ in range(ROUNDS)
    ]
    best = {key: max(run[key] for run in runs) for key in runs[0]}
    speeds = " | ".join(f"{best[step]:,.1f}" for step in ("map", "reduce", "apply", "all"))
    return (
        f"| {corpus} | {name} | {best['MB']:.0f} | {speeds} | {best['MiB']:,.0f} MiB | {best['noted']:.2f} | "
        f"{best['gone']:.2%} |"
    )


def main(words: list[str]) -> None:
    """Runs what the command line says."""
    if words:
        print(json.dumps(whole(words[0], words[1], int(words[2]))))
        return
    print("| corpus | transform | MB | map, MB/s | reduce, MB/s | apply, MB/s | all three, MB/s | peak memory | "
          "noted, bytes per byte | removed |\n| --- | --- |" + " ---: |" * 8)  # fmt: skip
    for corpus in CORPORA:
        for name in ("RepeatedSubstrings", "RepeatedLines", "NearDuplicates"):
            print(line(name, corpus, BYTES), flush=True)
    for size in (BYTES // 4, BYTES * 4):
        print(line("RepeatedSubstrings", "prose", size), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
