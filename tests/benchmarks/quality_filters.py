"""Prints how fast the quality filters are, and datatrove's in another Python, in turn, and where their decisions differ.

    python -m tests.benchmarks.quality_filters --datatrove datatrove/bin/python [--prose]

The other Python has datatrove, spacy and nltk. The texts are descriptions of installed packages, sources among them, and
Python's help, in documents of some kB. Times are CPU seconds of one thread. "cold": what ours remember of words is cleared
before each block; datatrove's spaCy keeps its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILTERS = {
    "GopherQuality": "GopherQualityFilter",
    "GopherRepetition": "GopherRepetitionFilter",
    "C4Quality": "C4QualityFilter",
    "FineWebQuality": "FineWebQualityFilter",
}


def main() -> None:
    """Prints a line for each filter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--datatrove", help="a Python that has datatrove")
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--prose", action="store_true", help="words drawn at random instead")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.json")
        texts = prose(options.megabytes) if options.prose else corpus(options.megabytes)
        path.write_text(json.dumps(texts))
        size = sum(len(text.encode()) for text in texts) / 1e6
        command = [options.datatrove, "-m", "tests.benchmarks.quality_filters", "--serve", str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin
            print(f"{size:.1f} MB in {len(texts)} documents, {options.blocks} blocks\n")
            print(
                "| filter | cold MB/s | warm MB/s | datatrove MB/s | ratio, cold | ratio, warm | other decisions | kept |"
            )
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            for name in FILTERS:
                report(name, texts, size, options.blocks, other)
            other.stdin.close()


def report(name: str, texts: list[str], size: float, blocks: int, other: subprocess.Popen[str]) -> None:
    """Runs both sides in turn and prints medians."""
    rows = []
    for _ in range(blocks):
        stage = keeps(name)
        cold, ours = timed(stage, texts, cold=True)
        warm, _ = timed(stage, texts)
        theirs, found = ask(other, FILTERS[name])
        rows.append((size / cold, size / warm, size / theirs, theirs / cold, theirs / warm))
    differing = sum(one != two for one, two in zip(ours, found, strict=True))
    speeds = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(
        f"| {name} | {speeds[0]:.1f} | {speeds[1]:.1f} | {speeds[2]:.2f} | {speeds[3]:.0f} | {speeds[4]:.0f} | "
        f"{differing} of {len(texts)} | {sum(ours) / len(ours):.2f} |",
        flush=True,
    )


def keeps(name: str) -> Callable[[str], bool]:
    """Returns what decides on a text, of ours."""
    from core import catalog

    stage: Any = catalog.find(name, "data").load()()
    if hasattr(stage, "cleaned"):
        return lambda text: stage.cleaned(text)[1] is None
    return lambda text: stage.reason(text) is None


def timed(decide: Callable[[str], bool], texts: list[str], cold: bool = False) -> tuple[float, list[bool]]:
    """Returns CPU seconds and decisions."""
    if cold:
        from toolkit import english_words

        english_words.words("Begin.")
        english_words._REMEMBERED.clear()
    begin = time.process_time()
    found = [decide(text) for text in texts]
    return time.process_time() - begin, found


def ask(other: subprocess.Popen[str], name: str) -> tuple[float, list[bool]]:
    """Lets the other Python run a filter."""
    assert other.stdin
    assert other.stdout
    other.stdin.write(f"{name}\n")
    other.stdin.flush()
    answer = json.loads(other.stdout.readline())
    return answer["seconds"], answer["kept"]


def serve(path: Path) -> None:
    """Runs datatrove's filters, one for each line that is read."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    texts = json.loads(path.read_text())
    for line in sys.stdin:
        stage = getattr(filters, line.strip())()

        def decide(text: str, stage: Any = stage) -> bool:
            return stage.filter(Document(text=text, id="")) is True

        decide(texts[0])
        seconds, kept = timed(decide, texts)
        print(json.dumps({"seconds": seconds, "kept": kept}), flush=True)


def corpus(megabytes: float) -> list[str]:
    """Returns documents of real text."""
    from pydoc_data.topics import topics

    site = Path(json.__file__).parents[1], Path(sys.prefix) / "lib"
    paths = [
        path
        for root in site
        for kind in ("METADATA", "*.md", "*.rst", "*.py")
        for path in sorted(root.rglob(kind))
    ]
    draw = random.Random(0)
    draw.shuffle(paths)
    found, size = [*topics.values()], sum(map(len, topics.values()))
    for path in paths:
        if size > megabytes * 1e6:
            break
        text = path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
        if path.suffix == ".py" and draw.random() < 0.8:
            continue
        found.append(text[:20_000])
        size += len(found[-1])
    return [text for text in found if text.strip()]


def prose(megabytes: float) -> list[str]:
    """Returns pages of sentences, with words drawn with Zipf's frequencies from 100,000; 2% are numbers."""
    draw = random.Random(0)
    made = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(100_000)]
    known = [
        *["the", "of", "and", "to", "a", "in", "that", "is", "was", "it", "for", "on", "be", "with", "as"],
        *made,
    ]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(known) + 1)))
    found, size = [], 0
    while size < megabytes * 1e6:
        lines = []
        for _ in range(draw.randint(4, 40)):
            words = draw.choices(known, cum_weights=weights, k=draw.randint(4, 30))
            words = [str(draw.randint(1, 3000)) if draw.random() < 0.02 else word for word in words]
            words = [word + draw.choice(",;") if draw.random() < 0.07 else word for word in words]
            lines.append(" ".join(words).capitalize() + draw.choice("...?!"))
        found.append("\n".join(" ".join(lines[at : at + 4]) for at in range(0, len(lines), 4)))
        size += len(found[-1])
    return found


if __name__ == "__main__":
    main()
