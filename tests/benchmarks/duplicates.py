"""Near duplicates among 20,000 documents: how many are found, how many wrongly, and what it costs, beside datatrove.

    python -m tests.benchmarks.duplicates [--datatrove PYTHON]

9,000 documents of Zipf-distributed words; of each a copy with 0.25% to 5% of the words changed, at random places; and 2,000
that share half of their text with one of them, as a trap. Both sides read the same JSON Lines and say which documents stay,
in turn, each in a process of its own, whose CPU time counts from its start to its end. `--datatrove` names the
Python that has datatrove (with spacy), if this one has not: their requirements differ. 14 bands of 8 rows, 5-grams of words.

What is true is computed from sets of tuples of words, by neither side. A merge is false if no other of the document's relatives
that stay is as similar as 0.75.

    python -m tests.benchmarks.duplicates memory

Peak memory of `reduce` of 250,000 and of 1,000,000 documents, of which synthetic hashes or signatures, with 100 5-grams each,
are on disk.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ORIGINALS, TRAPS, ROUNDS = 9000, 2000, 2
SHARES = (0.0025, 0.005, 0.01, 0.0125, 0.025, 0.05)
THRESHOLD, NGRAM, BANDS, ROWS = 0.75, 5, 14, 8
CLOSE = 0.0125
"""Up to this share of words changed, recall is compared."""


def documents(seed: int = 0) -> Iterator[tuple[int, float, str]]:
    """Yields (number of the original, share of words changed, text); the share of an original is 0, of a trap -1."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    vocabulary = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(50_000)
    ]
    weights = 1 / np.arange(3, len(vocabulary) + 3)
    ends = np.cumsum(weights / weights.sum())

    def drawn(size: int) -> list[str]:
        return [
            vocabulary[place] for place in np.minimum(np.searchsorted(ends, numbers.random(size)), 49_999)
        ]

    for number in range(ORIGINALS):
        words = drawn(int(np.clip(numbers.lognormal(5.9, 0.7), 60, 4000)))
        yield number, 0.0, prose(words)
        share = SHARES[number % len(SHARES)]
        changed = list(words)
        for place in rng.sample(range(len(words)), max(1, round(share * len(words)))):
            changed[place] = vocabulary[rng.randrange(len(vocabulary))]
        yield number, share, prose(changed)
        if number < TRAPS:
            yield number, -1.0, prose([*words[: len(words) // 2], *drawn(len(words) // 2)])


def prose(words: list[str]) -> str:
    """Returns words as sentences of 12 words in paragraphs."""
    sentences = [" ".join(words[at : at + 12]).capitalize() + "." for at in range(0, len(words), 12)]
    return "\n".join(" ".join(sentences[at : at + 8]) for at in range(0, len(sentences), 8))


def write(folder: Path) -> list[tuple[int, float, str]]:
    """Writes the documents in a random order, in four files; returns them in that order."""
    found = list(documents())
    random.Random(1).shuffle(found)
    folder.mkdir()
    size = len(found) // 4
    for file in range(4):
        some = range(file * size, len(found) if file == 3 else (file + 1) * size)
        lines = [json.dumps({"id": str(n), "text": found[n][2]}) + "\n" for n in some]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    return found


# The two sides, each in a process of its own ---------------------------------------------------------------


def leyden_side(source: Path, folder: Path) -> list[int]:
    """Returns the numbers of the documents that NearDuplicates keeps."""
    from datamodules.preparation.map_task import map_reduce
    from datamodules.preparation.pipeline import Pipeline, Tally
    from datamodules.preparation.readers.json_lines_documents import JSONLinesDocuments
    from datamodules.preparation.transforms.near_duplicates import NearDuplicates

    reader = JSONLinesDocuments(str(source))
    tasks = [task | {"number": number} for number, task in enumerate(reader.tasks())]
    pipeline = Pipeline(reader, [NearDuplicates(THRESHOLD, NGRAM, BANDS, ROWS)])
    map_reduce(pipeline, tasks, folder, lambda work, tasks: map(work, tasks))
    kept = [name for task in tasks for b in pipeline.batches(task, Tally(1)) for name in b["id"].to_pylist()]
    at = {}
    for path in sorted(source.iterdir()):
        offset = 0
        for line in path.read_bytes().splitlines(keepends=True):
            at[f"{path.name}:{offset}"] = int(json.loads(line)["id"])
            offset += len(line)
    return [at[name] for name in kept]


def datatrove_side(source: Path, folder: Path) -> list[int]:
    """Returns the numbers of the documents that datatrove's four MinHash steps keep."""
    import gzip
    import logging

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import dedup
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    logging.disable()
    config = dedup.minhash.MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    signatures, buckets, removed = (str(folder / name) for name in ("signatures", "buckets", "removed"))
    steps = [
        ([JsonlReader(str(source)), dedup.MinhashDedupSignature(signatures, config)], 1),
        ([dedup.MinhashDedupBuckets(signatures, buckets, config=config)], BANDS),
        ([dedup.MinhashDedupCluster(buckets, removed, config=config)], 1),
        ([JsonlReader(str(source)), dedup.MinhashDedupFilter(removed), JsonlWriter(str(folder / "kept"))], 1),
    ]
    for number, (pipeline, tasks) in enumerate(steps):
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"log-{number}")
        ).run()
    return [
        int(json.loads(line)["id"])
        for path in sorted((folder / "kept").iterdir())
        for line in gzip.open(path, "rt")
    ]


SIDES = {"leyden": leyden_side, "datatrove": datatrove_side}


def measured(side: str, python: str, source: Path) -> tuple[float, int, list[int]]:
    """Returns CPU seconds, peak memory in bytes, and the documents kept, of a side in its own process."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [python, "-m", "tests.benchmarks.duplicates", "side", side, str(source), folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    kept, most = json.loads(done.stdout.splitlines()[-1])
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, most, kept


def peak() -> int:
    """Returns this process's peak memory in bytes; `ru_maxrss` would begin with that of its parent."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


# What is true ----------------------------------------------------------------------------------------------


def grams(text: str) -> set[tuple[str, ...]]:
    """Returns the set of 5-grams of words of a text."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)}


def judged(found: list[tuple[int, float, str]], kept: list[int]) -> dict[str, float]:
    """Returns recall for each share of words changed and for pairs above the threshold, and false merges."""
    families: dict[int, list[int]] = defaultdict(list)
    for number, (family, _, _) in enumerate(found):
        families[family].append(number)
    stays, hits, false = set(kept), defaultdict(list), 0
    for members in families.values():
        sets = {number: grams(found[number][2]) for number in members}
        one, other = (
            next(n for n in members if (found[n][1] == 0) == original) for original in (True, False)
        )
        other = next(n for n in members if found[n][1] > 0)
        missed = one in stays and other in stays
        hits[f"{found[other][1]:.2%} of the words"].append(not missed)
        if found[other][1] <= CLOSE:
            hits["up to 1.25%"].append(not missed)
        if similarity(sets[one], sets[other]) >= THRESHOLD:
            hits[f"similarity of {THRESHOLD} or more"].append(not missed)
        left = [sets[number] for number in members if number in stays]
        for number in members:
            near = any(similarity(sets[number], some) >= THRESHOLD for some in left)
            false += number not in stays and not near
    return {name: float(np.mean(hits[name])) for name in sorted(hits)} | {"false merges": false}


def similarity(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """Returns the Jaccard similarity."""
    return len(one & other) / len(one | other)


def compare(pythons: dict[str, str]) -> None:
    """Prints the figures of both sides."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        found = write(source)
        size = sum(path.stat().st_size for path in source.iterdir())
        print(f"{len(found):,} documents, {size / 1e6:.1f} MB", flush=True)
        runs: dict[str, list[tuple[float, int, list[int]]]] = defaultdict(list)
        for _ in range(ROUNDS):
            for side, python in pythons.items():
                runs[side].append(measured(side, python, source))
                print(f"{side}: {runs[side][-1][0]:.1f} s", flush=True)
    table = {side: judged(found, some[0][2]) for side, some in runs.items()}
    for side, some in runs.items():
        seconds = [run[0] for run in some]
        table[side]["documents per CPU-second, best"] = len(found) / min(seconds)
        table[side]["documents per CPU-second, worst"] = len(found) / max(seconds)
        table[side]["MB per CPU-second, best"] = size / 1e6 / min(seconds)
        table[side]["peak memory, MB"] = max(run[1] for run in some) / 1e6
        table[side]["runs that keep the same documents"] = sum(run[2] == some[0][2] for run in some)
    print(f"\n| | {' | '.join(table)} |\n| --- |{' ---: |' * len(table)}")
    for name in next(iter(table.values())):
        values = [table[side][name] for side in table]
        print(f"| {name} | {' | '.join(f'{v:,.4f}' if v < 1 else f'{v:,.1f}' for v in values)} |")


# Memory ------------------------------------------------------------------------------------------------------


def synthetic(
    folder: Path, number: int, block: int = 500, shingles: int = 100, files: int = 10
) -> list[Path]:
    """Writes signatures of which every fifth in the second half repeats one of the first half, with 5 shingles changed."""
    from datamodules.preparation.duplicates.duplicate_filter import hashes
    from datamodules.preparation.duplicates.shingles import ShingleSets, mixed
    from datamodules.preparation.duplicates.signature_file import write_block

    paths = [folder / f"{file:06}" for file in range(files)]
    for path, part in zip(paths, np.array_split(np.arange(number, dtype=np.uint64), files), strict=True):
        with path.open("wb") as file:
            for at in range(0, len(part), block):
                own = part[at : at + block]
                copies = (own >= number // 2) & (own % 5 == 0)
                first = np.where(copies, own - np.uint64(number // 2), own)
                keys = mixed(np.broadcast_arrays(first[:, None], np.arange(BANDS, dtype=np.uint64)))
                keys[copies, : BANDS // 2] = mixed(
                    np.broadcast_arrays(own[copies, None], np.arange(BANDS // 2, dtype=np.uint64))
                )
                sets = mixed(np.broadcast_arrays(first[:, None], np.arange(shingles, dtype=np.uint64)))
                sets[:, :5] ^= own[:, None]
                values = np.sort(sets, axis=1).ravel()
                ends = np.arange(len(own) + 1) * shingles
                write_block(file, hashes([b"%d" % n for n in own]), keys, ShingleSets(values, ends))
    return paths


def synthetic_texts(folder: Path, number: int, files: int = 10) -> list[Path]:
    """Writes what ExactDuplicates notes of documents of which every fifth in the second half repeats one of the first."""
    from datamodules.preparation.duplicates.duplicate_filter import hashes

    paths = [folder / f"{file:06}" for file in range(files)]
    for path, part in zip(paths, np.array_split(np.arange(number), files), strict=True):
        first = [n - number // 2 if n >= number // 2 and n % 5 == 0 else n for n in part.tolist()]
        text, document = hashes([b"%d" % n for n in first]), hashes([b"id %d" % n for n in part.tolist()])
        path.write_bytes(np.stack([text, document], axis=1).tobytes())
    return paths


def memory() -> None:
    """Prints peak memory of `reduce`, in processes of their own."""
    for name in ("ExactDuplicates", "NearDuplicates"):
        for number in (250_000, 1_000_000):
            words = [sys.executable, "-m", "tests.benchmarks.duplicates", "reduce", name, str(number)]
            print(
                subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip(), flush=True
            )


def reduced(name: str, number: int) -> None:
    """Writes what is noted of documents, reduces it, and prints the peak memory and how many documents are dropped."""
    from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
    from datamodules.preparation.transforms.near_duplicates import NearDuplicates

    near = name == "NearDuplicates"
    transform = NearDuplicates(THRESHOLD, NGRAM, BANDS, ROWS) if near else ExactDuplicates()
    with tempfile.TemporaryDirectory() as folder:
        paths = (synthetic if near else synthetic_texts)(Path(folder), number)
        size = sum(path.stat().st_size for path in paths)
        begin = time.process_time()
        before = peak() / 2**20
        transform.reduce(paths, Path(folder) / "conclusion")
        most = peak() / 2**20
        transform.load(Path(folder) / "conclusion")
        dropped = int(np.count_nonzero(transform._clusters[1] == 0))
    print(
        f"{name}: {number:,} documents, {size / 1e6:,.0f} MB noted: peak {most:,.0f} MiB ({before:,.0f} before), "
        f"{time.process_time() - begin:.1f} CPU seconds, {dropped:,} dropped of {number // 10:,} planted"
    )


def main(words: list[str]) -> None:
    """Runs what the command line says."""
    if words[:1] == ["side"]:
        kept = SIDES[words[1]](Path(words[2]), Path(words[3]))
        print(json.dumps([kept, peak()]))
    elif words[:1] == ["reduce"]:
        reduced(words[1], int(words[2]))
    elif words[:1] == ["memory"]:
        memory()
    else:
        python = words[1] if words[:1] == ["--datatrove"] else sys.executable
        there = subprocess.run([python, "-c", "import datatrove, spacy"], capture_output=True, check=False)
        if there.returncode:
            print(f"{python} has no datatrove with spacy: leyden alone. See --datatrove.")
        compare({"leyden": sys.executable} | ({} if there.returncode else {"datatrove": python}))


if __name__ == "__main__":
    main(sys.argv[1:])
