"""Prints how fast QualityClassifier scores text and how fast a quality filter is trained, in MB/s of one core.

    python -m tests.benchmarks.quality_classifier

The texts are Python's help, and sources of its library as examples of what to drop, both cut into pieces. Times are CPU
seconds of one thread, medians of five rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from core import catalog
from core.__main__ import main as core


def main() -> None:
    """Trains a filter and prints a line for each length of document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    prose = "\n\n".join(catalog.find("TextDocuments", "data").load()(source="python-docs").documents())
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)[: len(prose)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, text in (("good", prose), ("bad", code)):
            lines = [json.dumps({"text": piece}) for piece in cut(text, 1000)]
            (folder / f"{kind}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        size = (len(prose.encode()) + len(code.encode())) / 1e6
        output = folder / "quality.safetensors"
        words = ["--good", folder / "good.jsonl", "--bad", folder / "bad.jsonl", "--output", output]
        seconds = timed(lambda: core(["train-quality-filter", *map(str, words)]), 1)
        print(f"\ntraining on {size:.1f} MB: {seconds:.1f} s, {size / seconds:.1f} MB/s\n")
        stage = catalog.find("QualityClassifier", "data").load()(path=str(output))
        print("| characters of a document | MB/s |\n| --- | --- |")
        for length in (1000, 4000, 20_000, 50_000):
            texts = cut(prose, length)
            seconds = timed(lambda: [stage.reason(text) for text in texts], rounds)  # noqa: B023
            print(f"| {length:,} | {len(prose.encode()) / 1e6 / seconds:.1f} |")


def cut(text: str, length: int) -> list[str]:
    """Returns a text in pieces."""
    return [text[begin : begin + length] for begin in range(0, len(text), length)]


def timed(work: Callable[[], object], rounds: int) -> float:
    """Returns the median of CPU seconds."""
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return statistics.median(found)


if __name__ == "__main__":
    main()
