"""How the steps of a preparation and of reading grow with the number of files, tasks and shards.

    python -m tests.benchmarks.many_shards [--numbers 2500 10000]

Each file is a task, and each task a shard, as with files of 512 MB; here they are small, so that what is measured is what each
costs beside its content. The last column is 1 where time grows as the number does, and the ratio of the numbers where it
grows with the square. Files of 512 MB are sparse: only their sizes are looked at.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from core.__main__ import main as command_line
from datamodules.packing.token_store import TokenStore
from datamodules.preparation import manifest, token_preparation
from datamodules.preparation.readers import source_files
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.token_preparation import TokenPreparation
from datamodules.preparation.tokenizers.bpe_tokenizer import BPETokenizer
from datamodules.preparation.transforms.exact_duplicates import ExactDuplicates
from datamodules.preparation.transforms.normalise import Normalise
from datamodules.preparation.writers.token_shards import TokenShards, _index

SHARDS, BYTES = 50_000, 512 << 20


def main() -> None:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, nargs=2, default=[2500, 10_000])
    few, many = parser.parse_args().numbers
    with tempfile.TemporaryDirectory() as root:
        listed(Path(root))
        found = [steps(Path(root, str(number)), number) for number in (few, many)]
    print(f"{'step':<34} {few:>9,} {many:>9,}   s; growth over linear")
    for what, seconds in found[0].items():
        other = found[1][what]
        print(f"{what:<34} {seconds:>9.2f} {other:>9.2f}   {other / max(seconds, 1e-3) / (many / few):.2f}")


def listed(root: Path) -> None:
    """Prints what finding files of 512 MB and cutting them into tasks takes."""
    folder = root / "sparse"
    folder.mkdir()
    for number in range(SHARDS):
        path = folder / f"shard-{number:05}.txt"
        path.touch()
        os.truncate(path, BYTES)
    tracemalloc.start()
    begin = time.perf_counter()
    tasks = TextDocuments(str(folder)).tasks()
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{SHARDS:,} files of 512 MB: {len(tasks):,} tasks in {seconds:.1f} s, {peak / 1e6:.0f} MB")


def steps(root: Path, number: int) -> dict[str, float]:
    """Returns seconds of each step."""
    (root / "source").mkdir(parents=True)
    for n in range(number):
        text = f"Document {n} of a set, about {n % 97} and {n % 89} things.\n" * 4
        (root / "source" / f"{n:06}.txt").write_text(text)
    source_files.LEAST, source_files.PARTS = 1, 1 << 30  # a task for each file
    found: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        found[what] = time.perf_counter() - begin
        return result

    def preparation() -> TokenPreparation:
        kinds = TextDocuments(str(root / "source")), BPETokenizer(300), TokenShards(1)
        return TokenPreparation(*kinds, transforms=[Normalise(), ExactDuplicates()])

    out = root / "out"
    out.mkdir()
    write_manifest = manifest.write_manifest
    timed("find files, make tasks", lambda: preparation().tasks)
    timed("plan", lambda: preparation().plan())
    begun: dict[str, Any] = {}

    def stop(*arguments: Any) -> None:
        begun["arguments"] = arguments

    token_preparation.write_manifest = stop  # type: ignore[assignment]
    timed("all tasks, map and reduce", lambda: preparation().run(out, "x"))
    timed("resume when all tasks are done", lambda: preparation().run(out, "x"))
    token_preparation.write_manifest = write_manifest
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, parts, tasks, *_ = begun["arguments"]
    small = [parts / f"{number:06}" / "train" for number in range(len(tasks))]
    groups = TokenShards()._fitting([c for p in small if p.exists() for c in _index(p)["chunks"]])
    timed("group small chunks for one shard", lambda: TokenShards()._fitting([*groups[0]]))
    timed("join, manifest, report", lambda: write_manifest(*begun["arguments"]))
    joined = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    files = len(os.listdir("/proc/self/fd"))
    store = timed("open the prepared folder", lambda: TokenStore(out / "train"))
    chunks = len(list((out / "train").glob("*.bin")))
    print(
        f"{number:,} tasks, {chunks:,} chunks: {len(os.listdir('/proc/self/fd')) - files:,} more open files, "
        f"{joined / 1e3:.0f} MB more at the peak of joining",
        flush=True,
    )
    timed("read all tokens", lambda: store.read(0, len(store)))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        timed("verify-data", lambda: command_line(["verify-data", str(out)]))
    return found


if __name__ == "__main__":
    main()
