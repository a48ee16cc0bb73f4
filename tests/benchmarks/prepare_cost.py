"""Prints what `prepare` takes: time, CPU seconds and memory, of a fresh folder and of a finished one.

    python -m tests.benchmarks.prepare_cost --megabytes 3.7
    python -m tests.benchmarks.prepare_cost --megabytes 20 --datatrove PYTHON

The second form also gives the text, as JSON Lines in one file for each core, to datatrove's JsonlReader and
DocumentTokenizer and to `prepare`, in turn, with a tokenizer that is trained already and without further stages.

Memory is looked at every 20 ms: the largest process (RSS), and all of them, each page shared by n counted as 1/n (PSS).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent.parent
CORES = len(os.sched_getaffinity(0))

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
source, tokenizer, out, cores = sys.argv[1:]
if __name__ == "__main__":
    steps = [JsonlReader(source), DocumentTokenizer(f"{out}/tokens", tokenizer_name_or_path=tokenizer,
                                                    eos_token="<|endoftext|>", shuffle_documents=False)]
    LocalPipelineExecutor(steps, tasks=int(cores), workers=int(cores), logging_dir=f"{out}/logs").run()
"""


def main() -> None:
    """Prepares twice and prints a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=3.7)
    parser.add_argument("--files", type=int, default=370)
    parser.add_argument("--datatrove", metavar="PYTHON", help="a Python that has datatrove")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("rest", nargs="*", help="further arguments of prepare, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"), int(options.megabytes * 1e6), options.files)
        command = [sys.executable, "-m", "core", "prepare", "--config", "data/text"]
        command += [f"--data.source={folder}/corpus", "--output", f"{folder}/prepared", *options.rest]
        print(f"{options.megabytes} MB in {options.files} files, {CORES} cores")
        for what in ("fresh", "finished"):
            _say(what, measured(command))
        if options.datatrove:
            _beside(Path(folder), options.datatrove, options.rounds)


def _say(what: str, figures: tuple[float, ...]) -> None:
    seconds, cpu, largest, together = figures
    print(
        f"{what:9}{seconds:7.2f} s {cpu:7.2f} CPU s {largest:6.0f} MB the largest {together:6.0f} MB together"
    )


def _beside(folder: Path, python: str, rounds: int) -> None:
    """Prints medians of `prepare` and datatrove on the same JSON Lines, and of the ratios of CPU time by round."""
    lines = [json.dumps({"text": path.read_text()}) + "\n" for path in sorted((folder / "corpus").iterdir())]
    (folder / "lines").mkdir()
    for core in range(CORES):
        (folder / "lines" / f"{core}.jsonl").write_text("".join(lines[core::CORES]))
    (folder / "program.py").write_text(DATATROVE)
    tokenizer = str(folder / "prepared" / "tokenizer.json")
    ours = [sys.executable, "-m", "core", "prepare", "--config", "data/text", f"--data.source={folder}/lines"]
    ours += [
        "--data.reader=JSONLinesDocuments",
        "--data.transforms=[]",
        "--data.tokenizer=PretrainedTokenizer",
    ]
    ours += [f"--data.tokenizer.path={tokenizer}"]
    theirs = [python, str(folder / "program.py"), str(folder / "lines"), tokenizer]
    found = []
    for number in range(rounds):
        found.append(
            (
                measured([*ours, "--output", f"{folder}/ours{number}"]),
                measured([*theirs, f"{folder}/theirs{number}", str(CORES)]),
            )
        )
    for what, side in zip(("leyden", "datatrove"), zip(*found, strict=True), strict=True):
        _say(what, tuple(map(statistics.median, zip(*side, strict=True))))
    print(f"CPU time over datatrove's: {statistics.median(a[1] / b[1] for a, b in found):.2f}")


def write_corpus(folder: Path, size: int, files: int) -> None:
    """Writes files of words, drawn with Zipf's frequencies."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    folder.mkdir()
    for number in range(files):
        text = ""
        while len(text) < size // files:
            text += " ".join(draw.choices(words, weights, k=1000)) + "\n"
        (folder / f"{number:06}.txt").write_text(text[: size // files])


def measured(command: list[str]) -> tuple[float, float, float, float]:
    """Returns seconds, CPU seconds, and the peaks in MB of the largest process and of all together."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=HOUSE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    largest = together = 0.0
    cpu: dict[int, float] = defaultdict(float)
    while process.poll() is None:
        pages = []
        for pid in tree(process.pid):
            with suppress(OSError, ValueError, IndexError):
                pages.append(memory(pid))
                cpu[pid] = max(cpu[pid], cpu_seconds(pid))
        largest = max([largest, *(rss for rss, _ in pages)])
        together = max(together, sum(pss for _, pss in pages))
        time.sleep(0.02)
    if process.returncode:
        sys.exit(process.stderr.read().decode() if process.stderr else "prepare failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    workers = sum(seconds for pid, seconds in cpu.items() if pid != process.pid)
    return time.perf_counter() - begin, max(own, own + workers), largest / 1e3, together / 1e3


def tree(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def memory(pid: int) -> tuple[float, float]:
    """Returns RSS and PSS in kB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: float(line.split()[1]) for line in lines}
    return fields["Rss"], fields["Pss"]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
