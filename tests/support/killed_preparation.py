"""Kills `prepare`, a process of its own with workers, at ten moments from its first to its last phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.prepare_cost import HOUSE, tree

MOMENTS = (
    ("the first documents are kept", "parts/documents-*/*", "group"),
    ("a map of exact duplicates is done", "parts/map-6/000*", "main"),
    ("another one", "parts/map-6/000*[1-9]", "worker"),
    ("reduce of exact duplicates is done", "parts/map-6/conclusion", "group"),
    ("a map of near duplicates is done", "parts/map-7/000*", "main"),
    ("reduce of near duplicates", "parts/map-7/*conclusion*", "group"),
    ("the split is chosen, the tokenizer is trained", "parts/split.json", "group"),
    ("encoding begins", "parts/000*.tmp", "worker"),
    ("a task is encoded", "parts/000*[0-9]", "group"),
    ("shards are joined", "train", "main"),
    ("the report is written", "report.*", "group"),
)
"""What has to be there, as a glob in the folder, and what is killed then: the command, with its group, or a worker alone."""


def command(source: Path, output: Path, more: Sequence[str] = ()) -> list[str]:
    """Returns the command, with two workers."""
    options = [f"--data.source={source}", "--output", str(output), "--data.engine.workers=2", *more]
    return [sys.executable, "-m", "core", "prepare", "--config", "data/web", *options]


def killed_at_all_moments(source: Path, output: Path, more: Sequence[str] = ()) -> list[str]:
    """Runs the command until it has finished, killed at each of the moments; returns the moments that it was killed at."""
    left, killed = list(MOMENTS), []
    while True:
        process = subprocess.Popen(
            command(source, output, more),
            cwd=HOUSE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        while process.poll() is None:
            if left and any(output.glob(left[0][1])):
                name, _, what = left.pop(0)
                if _kill(process.pid, what):
                    killed.append(name)
            time.sleep(0.0005)
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        if process.returncode == 0:
            return killed
        assert process.returncode == -signal.SIGKILL, errors


def _kill(pid: int, what: str) -> bool:
    """Returns whether there was such a process."""
    if what == "group":
        os.killpg(pid, signal.SIGKILL)
    elif what == "main":
        os.kill(pid, signal.SIGKILL)
    else:
        workers = _workers(pid)
        for worker in workers[:1]:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        return bool(workers)
    return True


def _workers(pid: int) -> list[int]:
    """Returns the processes that the fork server has started."""
    children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for one in tree(pid) if one != pid and one not in children]
