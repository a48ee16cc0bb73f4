"""Runs the tasks of a preparation as array jobs of a SLURM cluster."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from core import durable
from core.contracts import Engine
from core.errors import ConfigError
from core.technique import technique
from datamodules.preparation.engines.engine_worker import (
    ATTEMPTS,
    answer,
    deadly,
    result,
    use_one_thread,
)

MOST_ELEMENTS = 1000
"""Elements of an array: SLURM's default for MaxArraySize is 1,001."""

ROUNDS_PER_JOB = 4
"""Elements for each place in the queue: those that end early leave their place to others."""

_OPTION = re.compile("[a-z][a-z-]*")
_VALUE = re.compile(r"[\w.,:@%+/=-]+")
_OURS = ("array", "job-name", "ntasks", "output", "chdir", "requeue", "open-mode")
_PATH = re.compile(r"[\w./@+,:=-]+")


@technique(paper="SLURM's job arrays, slurm.schedmd.com/job_array.html")
class SlurmEngine(Engine):
    """Runs data preparation on a SLURM cluster: array jobs, each element of which does some of the tasks, one by one.

    The main process submits the array with `sbatch`, reads answers from a folder and asks `squeue` whether the array is
    over; it runs on a login node, or in a job of its own. All machines need the same packages at the same path, and a
    shared file system for the text, the output and `folder`. A preempted element begins again with what it has not
    done. Tasks whose process died are submitted again; after three deaths the run stops and names the task. Where the
    main process ends early, the array is cancelled. The tokens are those of `LocalEngine`, byte for byte.

    Args:
        jobs: Most elements that run at a time.
        options: Further options of `sbatch` for each element, such as {partition: cpu, time: "02:00:00", mem: 4G}.
        folder: Where scripts, logs and answers lie until the end, on the shared file system; None: `slurm` in
            `$XDG_CACHE_HOME/leyden` or `~/.cache/leyden`.
        poll_seconds: Seconds between looks at the answers.

    Raises:
        ConfigError: If a number or an option is out of range, or `sbatch` or `squeue` is missing or fails.

    Example:
        data:
          init_args:
            engine:
              class_path: SlurmEngine
              init_args: {jobs: 64, options: {partition: cpu, time: "02:00:00", mem: 4G}}
    """

    def __init__(
        self,
        jobs: int = 32,
        options: dict[str, str] | None = None,
        folder: str | None = None,
        poll_seconds: float = 5.0,
    ) -> None:
        if jobs < 1 or not poll_seconds > 0:
            raise ConfigError(f"SlurmEngine: jobs={jobs} is at least 1, poll_seconds={poll_seconds} above 0.")
        self.jobs, self.poll_seconds = jobs, poll_seconds
        self.options = {"cpus-per-task": "1"} | {name: str(value) for name, value in (options or {}).items()}
        for name, value in self.options.items():
            if name in _OURS or not _OPTION.fullmatch(name) or not _VALUE.fullmatch(value):
                raise ConfigError(
                    f"SlurmEngine: options has {name}={value!r}. It takes long options of sbatch without dashes and spaces, such "
                    f"as partition, time, mem, account; not {', '.join(_OURS)}, which the engine sets."
                )
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"  # core's function of it would import torch
        self.folder = Path(os.path.expanduser(folder or f"{cache}/leyden/slurm")).absolute()
        if not _PATH.fullmatch(str(self.folder)):
            raise ConfigError(
                f"SlurmEngine: folder is {str(self.folder)!r}; sbatch takes letters, digits and ./@+,:=-_ in it."
            )

    def run(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], tasks: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Calls `work` for each task and yields what it returns, as they are done."""
        if not tasks:
            return
        pickled, keep = pickle.dumps(work), False
        folder = self.folder / f"prepare-{uuid.uuid4().hex[:12]}"
        try:
            for name in ("answers", "begun"):
                (folder / name).mkdir(parents=True)
            (folder / "work.pickle").write_bytes(pickled)
            (folder / "tasks.json").write_text(json.dumps(list(tasks)), encoding="utf-8")
            digest = hashlib.sha256(pickled).hexdigest()
            for index, found in self._answers(folder, digest, len(tasks)):
                if keep := found is None:
                    raise deadly(tasks[index], f"see {folder}/*.log", self)
                yield result(found, self)
        except OSError as error:
            raise ConfigError(
                f"SlurmEngine: {folder} cannot be written: {durable.write_error(error)}."
            ) from error
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    def describe(self, tasks: int) -> str:
        """Returns the script that `sbatch` would be given."""
        return self._script(self.folder / "RUN", "SHA256", 0, self._elements(range(tasks)))

    def _answers(self, folder: Path, digest: str, number: int) -> Iterator[tuple[int, Any]]:
        """Yields a task's index and its answer; None if its processes died."""
        left, deaths, array = set(range(number)), Counter[int](), 0
        while left:
            elements = self._elements(sorted(left))
            (folder / f"elements-{array}.json").write_text(json.dumps(elements), encoding="utf-8")
            script = folder / f"array-{array}.sh"
            script.write_text(self._script(folder, digest, array, elements), encoding="utf-8")
            before = len(left)
            for index, found in self._array(script, folder / "answers", left):
                left.discard(index)
                yield index, found
            begun = {int(path.name) for path in (folder / "begun").iterdir()}
            if len(left) == before and not begun & left:
                raise ConfigError(_nothing_done(folder, array))
            for index in sorted(begun & left):
                (folder / "begun" / str(index)).unlink()
                deaths[index] += 1
                if deaths[index] == ATTEMPTS:
                    yield index, None
            array += 1

    def _elements(self, tasks: Sequence[int]) -> list[list[int]]:
        """Divides tasks among the elements of an array, in order: tasks of one element read neighbouring files."""
        number = min(len(tasks), ROUNDS_PER_JOB * self.jobs, MOST_ELEMENTS)
        bounds = [len(tasks) * element // number for element in range(number + 1)]
        return [list(tasks[begin:end]) for begin, end in pairwise(bounds)]

    def _array(self, script: Path, answers: Path, left: set[int]) -> Iterator[tuple[int, Any]]:
        """Submits an array and yields answers until it is over."""
        job = _command("sbatch", "--parsable", str(script)).partition(";")[0].strip()
        over = False
        try:
            while left:
                was_over, over = over, over or _is_over(job)
                for path in list(answers.iterdir()):
                    if path.suffix == ".json" and (index := int(path.stem)) in left:
                        yield index, tuple(json.loads(path.read_text(encoding="utf-8")))
                if was_over:  # one more look behind it: file systems of several machines show files late
                    return
                if left:
                    time.sleep(self.poll_seconds)
        finally:
            if left and not over:
                subprocess.run(["scancel", job], capture_output=True, check=False)

    def _script(self, folder: Path, digest: str, array: int, elements: Sequence[Sequence[int]]) -> str:
        """Returns what `sbatch` is given."""
        options = {
            "job-name": "leyden-prepare",
            "array": f"0-{len(elements) - 1}%{self.jobs}",
            "ntasks": "1",
            "output": f"{folder}/array-{array}-%a.log",
            "open-mode": "append",
            **self.options,
        }
        module = [sys.executable, "-m", "datamodules.preparation.engines.slurm_engine"]
        lines = [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{name}={value}" for name, value in options.items()),
            "#SBATCH --requeue",
            "set -euo pipefail",
            f"cd {shlex.quote(os.getcwd())}",
            f"export PYTHONPATH={shlex.quote(os.pathsep.join(place for place in sys.path if place))}",
            f'exec {shlex.join([*module, str(folder), digest, str(array)])} "$SLURM_ARRAY_TASK_ID"',
        ]
        return "\n".join(lines) + "\n"


def _command(*words: str) -> str:
    """Returns what a command of SLURM prints.

    Raises:
        ConfigError: If there is none, or it fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"SlurmEngine: {words[0]} is not on the PATH of this machine: prepare on a login node of the cluster, or with "
            "--data.engine=LocalEngine."
        ) from error
    if done.returncode:
        raise ConfigError(f"SlurmEngine: {words[0]} failed: {(done.stderr.strip() or 'no message')[:500]}")
    return done.stdout


def _is_over(job: str) -> bool:
    """Returns whether an array is over. A `squeue` that fails otherwise is asked again: its server may be busy."""
    try:
        return not _command("squeue", "--noheader", f"--jobs={job}").strip()
    except ConfigError as error:
        if "not on the PATH" in str(error):
            raise
        return "Invalid job id" in str(error)


def _nothing_done(folder: Path, array: int) -> str:
    """Returns the message for an array that ended before any of the tasks that are left began."""
    logs = sorted(folder.glob(f"array-{array}-*.log"))
    last = [
        line
        for log in logs[:1]
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    ]
    return (
        f"SlurmEngine: the array job ended and no task began{f': {last[0][:300]}' if last else ', without a log'}.\n"
        f"All machines need the same packages at the same path, and have to see {folder.parent} (data.engine.folder)."
    )


def work_on_element(folder: Path, digest: str, array: int, element: int) -> None:
    """Does the tasks of an element that have no answer yet; called on the machines of the cluster.

    Raises:
        ConfigError: If the work is not what the main process wrote.
    """
    use_one_thread()
    pickled = (folder / "work.pickle").read_bytes()
    if hashlib.sha256(pickled).hexdigest() != digest:
        raise ConfigError(f"{folder / 'work.pickle'} is not what the main process wrote (SHA-256).")
    work = pickle.loads(pickled)
    tasks: Sequence[Mapping[str, Any]] = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    elements = json.loads((folder / f"elements-{array}.json").read_text(encoding="utf-8"))
    for index in elements[element]:
        target = folder / "answers" / f"{index}.json"
        if not target.exists():
            (folder / "begun" / str(index)).touch()
            durable.write(target, json.dumps(answer(work, dict(tasks[index]))))


if __name__ == "__main__":
    work_on_element(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
