"""Prints what configs/data/web.yaml takes on a sample of the web, per stage and as a whole, beside datatrove in another Python.

    python -m tests.benchmarks.web_corpus --datatrove datatrove/bin/python                  # the stages, 6 MB
    python -m tests.benchmarks.web_corpus --whole 25 50 100 --datatrove datatrove/bin/python  # all of prepare, by megabytes
    python -m tests.benchmarks.web_corpus --kills 100                                       # killed in each phase

The other Python has datatrove, trafilatura, warcio, fasttext, spacy and nltk. Stages run over the same documents on both sides, in turn, one
thread each; times are CPU seconds, medians over rounds. The sample is made of what is installed here; see tests.support.web_sample.
It has no broken records here: datatrove's reader stops at the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THEIRS = {
    "WARCDocuments, resiliparse": "extract",
    "WARCDocuments, trafilatura": "extract",
    "GopherRepetition": "GopherRepetitionFilter",
    "GopherQuality": "GopherQualityFilter",
    "C4Quality": "C4QualityFilter",
    "FineWebQuality": "FineWebQualityFilter",
    "NearDuplicates": "minhash",
    "PersonalData": "PIIFormatter",
}
"""What datatrove has. Its LanguageFilter downloads a model; its tokens are those of `tokenize_throughput`."""


def main() -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--datatrove", help="a Python that has datatrove")
    parser.add_argument("--megabytes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", type=float, nargs="+", help="sizes in MB of samples for all of prepare")
    parser.add_argument("--most", type=float, default=25.0, help="largest of them that datatrove gets, in MB")
    parser.add_argument("--kills", type=float, help="size in MB of the sample that is prepared with kills")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--pipeline", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve))
    elif options.pipeline:
        pipeline(*map(Path, options.pipeline))
    else:
        with tempfile.TemporaryDirectory() as name:
            if options.kills:
                kills(Path(name), options.kills)
            elif options.whole:
                whole(Path(name), options.whole, options.datatrove, options.most)
            else:
                stages(Path(name), options.megabytes, options.rounds, options.datatrove)


# Per stage --------------------------------------------------------------------------------------------------


def stages(folder: Path, megabytes: float, rounds: int, datatrove: str | None) -> None:
    """Prints a line for each stage."""
    from tests.support.web_sample import write_web_sample

    write_web_sample(folder / "sample", megabytes, files=2, broken=False)
    other = None
    if datatrove:
        command = [datatrove, "-m", "tests.benchmarks.web_corpus", "--serve", str(folder)]
        other = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    print(f"{megabytes} MB, {rounds} rounds\n")
    print("| stage | documents | MB | kept | MB/s per core | datatrove MB/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, size, documents, run in ours(folder, megabytes):
        mine, theirs = [], []
        for number in range(rounds):
            begin = cpu()
            kept = run(number)
            mine.append(cpu() - begin)
            if other and name in THEIRS:
                theirs.append(asked(other, THEIRS[name]))
        speed = size / statistics.median(mine)
        beside = ["-", "-"]
        if theirs:
            ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
            beside = [f"{size / statistics.median(theirs):.2f}", f"{ratio:.1f}"]
        print(
            f"| {name} | {documents:,} | {size:.1f} | {kept:,} | {speed:.1f} | {' | '.join(beside)} |",
            flush=True,
        )
    if other and other.stdin:
        other.stdin.close()
        other.wait()


def ours(folder: Path, megabytes: float) -> Iterator[tuple[str, float, int, Callable[[int], int]]]:
    """Yields each stage: name, MB and documents of its input, and a function that runs it and returns what it keeps."""
    from core import catalog
    from datamodules.preparation.flow import text_bytes
    from datamodules.preparation.readers.warc_documents import WARCDocuments

    held: list[Any] = []

    def read(extractor: Any) -> int:
        reader = WARCDocuments(str(folder / "sample"), extractor)
        held[:] = [batch for task in reader.tasks() for batch in reader.read(task, lambda *_: None)]
        return sum(map(len, held))

    records = sum(1 for _ in _records(folder / "sample"))
    for extractor in ("trafilatura", "resiliparse"):
        yield f"WARCDocuments, {extractor}", megabytes, records, lambda _, name=extractor: read(name)
    chosen: list[tuple[str, dict[str, Any]]] = [
        ("Normalise", {}),
        ("LanguageFilter", {"languages": ["en"]}),
        ("GopherRepetition", {}),
        ("GopherQuality", {}),
        ("C4Quality", {"closed_lines": False}),
        ("FineWebQuality", {}),
        ("ExactDuplicates", {}),
        ("NearDuplicates", {}),
        ("PersonalData", {}),
    ]
    for name, options in chosen:
        batches = list(held)
        texts = [text for batch in batches for text in batch["text"].to_pylist()]
        (folder / "texts.json").write_text(json.dumps(texts))

        transform: Any = catalog.find(name, "data").load()(**options)
        if not transform.needs_all_documents:
            transform.apply(batches[0], lambda *_: None)  # loads what it needs

        def run(number: int, batches: Any = batches, name: str = name, transform: Any = transform) -> int:
            if transform.needs_all_documents:
                findings, end = folder / f"{name}-{number}", folder / f"{name}-{number}-end" / "conclusion"
                end.parent.mkdir()
                transform.map(iter(batches), findings)
                transform.reduce([findings], end)
                transform.load(end)
            held[:] = [transform.apply(batch, lambda *_: None) for batch in batches]
            held[:] = [batch for batch in held if len(batch)]
            return sum(map(len, held))

        yield name, sum(text_bytes(batch["text"]) for batch in batches) / 1e6, len(texts), run


def _records(folder: Path) -> Iterator[Any]:
    from datamodules.preparation.readers.warc_records import records

    for path in sorted(folder.iterdir()):
        yield from records(path, "", 1 << 22, lambda *_: None)


def asked(other: subprocess.Popen[str], name: str) -> float:
    """Lets the other Python run a stage; returns its CPU seconds."""
    assert other.stdin
    assert other.stdout
    other.stdin.write(f"{name}\n")
    other.stdin.flush()
    return float(other.stdout.readline())


def serve(folder: Path) -> None:
    """Runs datatrove's stages, one for each line that is read; the first time once more, to load what it needs."""
    known = set()
    for number, line in enumerate(sys.stdin):
        name = line.strip()
        if name not in known:
            datatrove_stage(name, folder, -1, first=True)
            known.add(name)
        print(datatrove_stage(name, folder, number), flush=True)


def datatrove_stage(name: str, folder: Path, number: int, first: bool = False) -> float:
    """Runs one of datatrove's stages over the documents; returns CPU seconds."""
    from datatrove.data import Document

    if name == "extract":
        begin = cpu()
        found = list(extracted(folder / "sample"))
        assert found
        return cpu() - begin
    texts = json.loads((folder / "texts.json").read_text())
    documents = [Document(text=text, id=str(one)) for one, text in enumerate(texts)][: 20 if first else None]
    if name == "minhash":
        begin = cpu()
        minhash(documents, folder / f"minhash-{number}")
        return cpu() - begin
    step = step_of(name)
    begin = cpu()
    list(step(iter(documents)))
    return cpu() - begin


def cpu() -> float:
    """Returns the CPU seconds of this process and of those that it started and that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def extracted(source: Path) -> Iterator[Any]:
    """Yields datatrove's documents of archives."""
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.readers import WarcReader

    yield from Trafilatura().run(WarcReader(str(source), glob_pattern="*.warc.gz").run())


def step_of(name: str) -> Any:
    """Returns one of datatrove's filters, with the options of FineWeb."""
    from datatrove.pipeline import filters, formatters

    options = {"filter_no_terminal_punct": False} if name == "C4QualityFilter" else {}
    return getattr(filters, name, getattr(formatters, name, None))(**options)


def minhash(documents: list[Any], folder: Path) -> None:
    """Runs datatrove's four steps of MinHash, with our bands and rows."""
    from datatrove.pipeline import dedup

    config = dedup.minhash.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    signatures, buckets, removed = (str(folder / part) for part in ("signatures", "buckets", "removed"))
    dedup.MinhashDedupSignature(signatures, config).run(iter(documents), 0, 1)
    for band in range(14):
        dedup.MinhashDedupBuckets(signatures, buckets, config=config).run(None, band, 14)
    dedup.MinhashDedupCluster(buckets, removed, config=config).run(None, 0, 1)
    list(dedup.MinhashDedupFilter(removed).run(iter(documents), 0, 1))


# The whole --------------------------------------------------------------------------------------------------


def whole(folder: Path, sizes: list[float], datatrove: str | None, most: float) -> None:
    """Prints time, CPU seconds and memory of prepare, and of datatrove's pipeline up to deduplicated, redacted text."""
    from tests.benchmarks.prepare_cost import measured
    from tests.support.killed_preparation import command
    from tests.support.web_sample import write_web_sample

    print("| what | MB | s | CPU s | MB/s per core | largest process, MB | together, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        source = folder / f"{size:g}"
        write_web_sample(source, size, files=16, broken=False)
        runs = [("prepare", command(source, folder / f"{size:g}-prepared"))]
        if datatrove and size <= most:
            words = ["-m", "tests.benchmarks.web_corpus", "--pipeline", str(source), f"{source}-datatrove"]
            runs.append(("datatrove, no languages, no tokens", [datatrove, *words]))
        for name, words in runs:
            seconds, cpu, largest, together = measured(words)
            print(
                f"| {name} | {size:g} | {seconds:.0f} | {cpu:.0f} | {size / cpu:.2f} | {largest:.0f} | {together:.0f} |",
                flush=True,
            )


def pipeline(source: Path, folder: Path) -> None:
    """Runs datatrove's stages over archives with two workers, in FineWeb's order."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import dedup
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.readers import JsonlReader, WarcReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    config = dedup.minhash.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    parts = ("filtered", "signatures", "buckets", "removed", "kept")
    filtered, signatures, buckets, removed, kept = (str(folder / part) for part in parts)
    names = ["GopherRepetitionFilter", "GopherQualityFilter", "C4QualityFilter", "FineWebQualityFilter"]
    reading = [WarcReader(str(source), glob_pattern="*.warc.gz"), Trafilatura(), *map(step_of, names)]
    steps: list[tuple[list[Any], int]] = [
        ([*reading, JsonlWriter(filtered)], 16),
        ([JsonlReader(filtered), dedup.MinhashDedupSignature(signatures, config)], 16),
        ([dedup.MinhashDedupBuckets(signatures, buckets, config=config)], 14),
        ([dedup.MinhashDedupCluster(buckets, removed, config=config)], 1),
        (
            [
                JsonlReader(filtered),
                dedup.MinhashDedupFilter(removed),
                step_of("PIIFormatter"),
                JsonlWriter(kept),
            ],
            16,
        ),
    ]
    for number, (stage, tasks) in enumerate(steps):
        executor = LocalPipelineExecutor(
            stage, tasks=tasks, workers=2, logging_dir=str(folder / f"log-{number}")
        )
        executor.run()


def kills(folder: Path, megabytes: float) -> None:
    """Prints the moments of the kills, and whether a byte differs from the folder of an undisturbed run."""
    from tests.benchmarks.prepare_cost import measured
    from tests.support.killed_preparation import command, killed_at_all_moments
    from tests.support.web_sample import write_web_sample

    write_web_sample(folder / "sample", megabytes, files=16)
    measured(command(folder / "sample", folder / "whole"))
    killed = killed_at_all_moments(folder / "sample", folder / "killed")
    found, wanted = (
        {path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()}
        for one in (folder / "killed", folder / "whole")
    )
    differing = sorted(str(path) for path in found.keys() | wanted if found.get(path) != wanted.get(path))
    print(
        f"{megabytes:g} MB, killed {len(killed)} times: {'; '.join(killed)}.\nFiles that differ: {len(differing)} {differing}"
    )


if __name__ == "__main__":
    main()
