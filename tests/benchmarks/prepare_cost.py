"""Prints what `prepare` takes: time, CPU seconds and memory, of a fresh folder and of a finished one.

    python -m tests.benchmarks.prepare_cost --megabytes 3.7

Memory is looked at every 20 ms: the largest process (RSS), and all of them, each page shared by n counted as 1/n (PSS).
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

HOUSE = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    """Prepares twice and prints a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=3.7)
    parser.add_argument("--files", type=int, default=370)
    parser.add_argument("rest", nargs="*", help="further arguments of prepare, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "corpus"), int(options.megabytes * 1e6), options.files)
        command = [sys.executable, "-m", "core", "prepare", "--config", "data/text"]
        command += [f"--data.source={folder}/corpus", "--output", f"{folder}/prepared", *options.rest]
        print(f"{options.megabytes} MB in {options.files} files, {len(os.sched_getaffinity(0))} cores")
        for what in ("fresh", "finished"):
            seconds, cpu, largest, all_ = measured(command)
            print(
                f"{what:9}{seconds:7.2f} s {cpu:7.2f} CPU s {largest:6.0f} MB the largest {all_:6.0f} MB together"
            )


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
