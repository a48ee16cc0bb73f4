import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.errors import ConfigError
from datamodules.preparation.engines.engine_worker import cores
from datamodules.preparation.engines.local_engine import LocalEngine
from tests.support.corpus import HEAVY


@dataclass
class Work:
    """Squares numbers, and fails where it is asked to, so many times."""

    folder: Path
    dies: dict
    fails: tuple = ()

    def __call__(self, task):
        number = task["number"]
        tries = self.folder / f"{number}-{time.monotonic_ns()}"
        tries.touch()
        if number in self.fails:
            raise ConfigError(f"number {number} is wrong") if number % 2 else ValueError(f"bug at {number}")
        if len(list(self.folder.glob(f"{number}-*"))) <= self.dies.get(number, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"number": number, "square": number**2, "threads": os.environ["OMP_NUM_THREADS"]}


TASKS = [{"number": number, "pieces": [{"path": f"file-{number}"}]} for number in range(9)]


@pytest.mark.parametrize("workers", [1, 2, 20])
def test_each_task_is_done_once(tmp_path, workers):
    found = list(LocalEngine(workers).run(Work(tmp_path, {}), TASKS))
    assert sorted(done["number"] for done in found) == list(range(9))
    assert all(done["square"] == done["number"] ** 2 and done["threads"] == "1" for done in found)
    assert len(list(tmp_path.iterdir())) == 9
    assert list(LocalEngine(workers).run(Work(tmp_path, {}), [])) == []


def test_a_killed_workers_task_is_done_again(tmp_path):
    found = list(LocalEngine(2).run(Work(tmp_path, {0: 1, 3: 2, 8: 1}), TASKS))
    assert sorted(done["number"] for done in found) == list(range(9))
    assert len(list(tmp_path.iterdir())) == 9 + 4


def test_a_task_that_kills_every_worker_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task 4 ended its process 3 times.*SIGKILL.*fewer workers"
    ) as caught:
        list(LocalEngine(2).run(Work(tmp_path, {4: 99}), TASKS))
    assert "file-4" in str(caught.value)


def test_mistakes_and_bugs_come_back_as_what_they_are(tmp_path):
    with pytest.raises(ConfigError, match="number 5 is wrong"):
        list(LocalEngine(2).run(Work(tmp_path, {}, (5,)), TASKS))
    with pytest.raises(RuntimeError, match="ValueError: bug at 2"):
        list(LocalEngine(1).run(Work(tmp_path, {}, (2,)), TASKS))


def test_a_number_of_workers_is_at_least_one():
    with pytest.raises(ConfigError, match="workers is 0"):
        LocalEngine(0)


def test_cores_are_counted_also_where_the_system_does_not_tell_which_are_ours(monkeypatch):
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cores() == os.cpu_count()


def loaded(task):
    return {"heavy": sorted(HEAVY & sys.modules.keys())}


def test_workers_import_nothing_heavy():
    """In a process of its own: the fork server of this one may have imported for other tests."""
    code = (
        "from test_local_engine import LocalEngine, TASKS, loaded\n"
        "[found] = LocalEngine(1).run(loaded, TASKS[:1])\n"
        "print(found['heavy'])"
    )
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here.parents[3]}{os.pathsep}{here}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "[]\n", done.stderr[-2000:]
