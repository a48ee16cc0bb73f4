"""What tests of transforms that need all documents share: running one over batches, in memory; killing a preparation."""

import os
import random
import signal
import time
from collections import Counter
from multiprocessing import get_context

import pyarrow

from core.contracts import Engine
from datamodules.preparation.duplicates.shingles import words
from tests.support.corpus import contents


def batches(documents, size=7):
    """Returns record batches of texts, with ids by their numbers."""
    rows = [(text, "source", f"file:{number}") for number, text in enumerate(documents)]
    columns = [list(zip(*rows[at : at + size], strict=True)) for at in range(0, len(rows), size)]
    return [
        pyarrow.record_batch(
            [pyarrow.array(column, pyarrow.large_string()) for column in of], ["text", "source", "id"]
        )
        for of in columns
    ]


def kept(transform, documents, folder, size=7, pieces=3):
    """Returns the numbers of the documents that a transform keeps, and how many it drops for each reason."""
    everything = batches(documents, size)
    step = -(-len(everything) // pieces) or 1  # batches of a piece
    parts = [everything[at : at + step] for at in range(0, len(everything), step)]
    folder.mkdir(parents=True, exist_ok=True)
    findings = [folder / f"{number:06}" for number in range(len(parts))]
    for path, part in zip(findings, parts, strict=True):
        transform.map(iter(part), path)
    transform.reduce(findings, folder / "conclusion")
    transform.load(folder / "conclusion")
    dropped, left = Counter(), []
    for batch in everything:
        found = transform.apply(batch, lambda reason, rows: dropped.update({reason: len(rows)}))
        left += [int(name.partition(":")[2]) for name in found["id"].to_pylist()]
    assert left == sorted(left)
    assert dropped.total() == len(documents) - len(left)
    return left, dropped


def planted(number=240, seed=0):
    """Returns documents, half of which are earlier ones with some words changed: none, few, or a third."""
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        if found and rng.random() < 0.5:
            share = rng.choice([0, 0.01, 0.02, 0.05, 0.3])
            text = [
                w if rng.random() > share else f"x{rng.randrange(10**6)}" for w in rng.choice(found).split()
            ]
        else:
            text = [f"w{int(rng.paretovariate(0.5)) % 5000}" for _ in range(rng.randint(4, 200))]
        found.append(" ".join(text))
    return found


def similarity(one, other, length=5):
    """Returns the Jaccard similarity of the n-grams of two texts, from all of them."""
    both = []
    for text in (one, other):
        found = words(text)
        both.append({tuple(found[at : at + length]) for at in range(max(len(found) - length + 1, 1))})
    return len(both[0] & both[1]) / len(both[0] | both[1])


class Backwards(Engine):
    """Runs the tasks in this process, the last one first."""

    def run(self, work, tasks):
        yield from map(work, reversed(tasks))


def child(run, source, folder):
    """Starts `run(source, folder)` in a process."""
    started = get_context("fork").Process(target=run, args=(source, folder))
    started.start()
    return started


def survives_kills(run, source, tmp_path):
    """Kills `run(source, folder)` at 10 random moments and runs it again: the folder has the same bytes."""
    begin = time.monotonic()
    whole = contents(run(source, tmp_path / "whole"))
    seconds, rng, kills, finished = time.monotonic() - begin, random.Random(0), 0, 0
    while kills < 10 or not finished:
        folder = tmp_path / f"out-{finished}"
        started = child(run, source, folder)
        started.join(rng.uniform(0, 0.6 * seconds) if kills < 10 else 240)
        if started.is_alive():
            os.kill(started.pid, signal.SIGKILL)
            kills += 1
        started.join(240)
        if started.exitcode == 0:
            assert contents(folder) == whole
            finished += 1
