"""SlurmEngine with commands that stand in for SLURM's and execute the scripts: real processes, one environment each."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.engines import slurm_engine
from datamodules.preparation.engines.local_engine import LocalEngine
from datamodules.preparation.engines.slurm_engine import SlurmEngine, work_on_element
from datamodules.preparation.readers import source_files
from datamodules.preparation.transforms.repeated_lines import RepeatedLines
from tests.support import slurm
from tests.support.corpus import HEAVY, contents, corpus, prepare, texts, write_lines


@dataclass
class Work:
    """Squares numbers; ends its process or fails where it is asked to, so many times."""

    folder: Path
    dies: dict
    fails: tuple = ()

    def __call__(self, task):
        number = task["number"]
        (self.folder / f"{number}-{time.monotonic_ns()}").touch()
        if number in self.fails:
            raise ConfigError(f"number {number} is wrong") if number % 2 else ValueError(f"bug at {number}")
        if len(list(self.folder.glob(f"{number}-*"))) <= self.dies.get(number, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"number": number, "square": number**2, "threads": os.environ["OMP_NUM_THREADS"]}


TASKS = [{"number": number, "pieces": [{"path": f"file-{number}"}]} for number in range(9)]


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    for name, value in slurm.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return Path(os.environ["SLURM_STAND_IN"])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "done").mkdir()
    return tmp_path / "done"


def engine(tmp_path, jobs=1, **options):
    return SlurmEngine(jobs, folder=str(tmp_path / "slurm"), poll_seconds=0.05, **options)


def states(jobs):
    return [path.read_text() for path in sorted(jobs.iterdir(), key=lambda path: int(path.name))]


def ended(jobs):
    """Waits until the stand-ins have noted the end of their jobs."""
    deadline = time.monotonic() + 60
    while any(state not in ("over", "cancelled") for state in states(jobs)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return states(jobs)


@pytest.mark.ci
def test_a_preparation_on_it_is_the_local_one_byte_for_byte(tmp_path, jobs, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 700)
    source = corpus(tmp_path / "in")
    found = prepare(source, tmp_path / "slurm-out", transforms=[], engine=engine(tmp_path, jobs=2))
    assert contents(found) == contents(
        prepare(source, tmp_path / "out", transforms=[], engine=LocalEngine(1))
    )
    assert len(states(jobs)) == 1
    assert list((tmp_path / "slurm").iterdir()) == []


@pytest.mark.slow
def test_a_transform_that_needs_all_documents_changes_no_byte(tmp_path, jobs, monkeypatch):
    monkeypatch.setattr(source_files, "LEAST", 700)
    source = tmp_path / "in"
    for number in range(4):
        write_lines(source / f"{number}.jsonl", [f"{text}\na line of all" for text in texts(80)[number::4]])
    options = {"transforms": [RepeatedLines(min_characters=10)]}
    found = contents(prepare(source, tmp_path / "slurm-out", engine=engine(tmp_path, jobs=2), **options))
    assert found == contents(prepare(source, tmp_path / "out", **options))


@pytest.mark.ci
def test_a_killed_elements_tasks_are_done_again_and_others_once(tmp_path, jobs, folder):
    found = list(engine(tmp_path).run(Work(folder, {0: 1, 3: 2}), TASKS))
    assert sorted(done["number"] for done in found) == list(range(9))
    assert all(done["square"] == done["number"] ** 2 and done["threads"] == "1" for done in found)
    assert len(list(folder.iterdir())) == 9 + 3
    assert ended(jobs) == ["over"] * 3
    assert list(engine(tmp_path).run(Work(folder, {}), [])) == []


@pytest.mark.slow
def test_a_task_that_kills_every_process_is_named_and_the_logs_stay(tmp_path, jobs, folder):
    with pytest.raises(ConfigError, match=r"task 4 ended its process 3 times, see .*\.log") as caught:
        list(engine(tmp_path).run(Work(folder, {4: 99}), TASKS))
    assert "file-4" in str(caught.value)
    [kept] = (tmp_path / "slurm").iterdir()
    assert {log.name for log in kept.glob("*.log")} >= {"array-0-2.log", "array-1-0.log", "array-2-0.log"}


@pytest.mark.parametrize(
    ("fails", "kind"), [(5, ConfigError), pytest.param(4, RuntimeError, marks=pytest.mark.ci)]
)
def test_an_error_of_a_task_arrives_and_the_array_is_cancelled(tmp_path, jobs, folder, fails, kind):
    work = Work(folder, {}, (fails,))
    tasks = [*TASKS, *({"number": number} for number in range(9, 400))]
    with pytest.raises(kind, match=f"number {fails} is wrong" if fails % 2 else f"bug at {fails}"):
        list(engine(tmp_path).run(work, tasks))
    assert ended(jobs) == ["cancelled"]
    assert len(list(folder.iterdir())) < 400
    assert list((tmp_path / "slurm").iterdir()) == []


@pytest.mark.ci
def test_a_run_that_ends_early_cancels_the_array(tmp_path, jobs, folder):
    running = engine(tmp_path).run(Work(folder, {}), TASKS)
    next(running)
    running.close()
    assert ended(jobs) == ["cancelled"]


def test_an_element_that_was_preempted_does_what_is_left(tmp_path, folder):
    home = tmp_path / "slurm"
    for name in ("answers", "begun"):
        (home / name).mkdir(parents=True)
    pickled = slurm_engine.pickle.dumps(Work(folder, {}))
    (home / "work.pickle").write_bytes(pickled)
    (home / "tasks.json").write_text(json.dumps(TASKS))
    (home / "elements-0.json").write_text("[[0, 1], [2]]")
    (home / "answers" / "0.json").write_text('["done", {"number": 0}]')
    digest = slurm_engine.hashlib.sha256(pickled).hexdigest()
    script = [
        sys.executable,
        "-m",
        "datamodules.preparation.engines.slurm_engine",
        str(home),
        digest,
        "0",
        "0",
    ]
    subprocess.run(
        script, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert sorted(path.name for path in (home / "answers").iterdir()) == ["0.json", "1.json"]
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["1"]
    with pytest.raises(ConfigError, match=r"not what the main process wrote \(SHA-256\)"):
        work_on_element(home, "0" * 64, 0, 0)


@pytest.mark.ci
def test_a_controller_that_does_not_answer_is_asked_again(tmp_path, jobs, folder):
    jobs.with_suffix(".busy").touch()
    assert len(list(engine(tmp_path).run(Work(folder, {}), TASKS))) == 9
    assert not jobs.with_suffix(".busy").exists()


def test_an_array_whose_processes_do_not_start_is_no_endless_loop(tmp_path, jobs, folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(
        ConfigError, match=r"no task began: .*/nowhere/python.*\nAll machines need the same packages"
    ):
        list(engine(tmp_path).run(Work(folder, {}), TASKS))


def test_a_job_that_sbatch_refuses_is_told_in_its_words(tmp_path, jobs, folder):
    with pytest.raises(
        ConfigError, match="sbatch failed: sbatch: error: invalid partition specified: nowhere"
    ):
        list(engine(tmp_path, options={"partition": "nowhere"}).run(Work(folder, {}), TASKS))
    assert list((tmp_path / "slurm").iterdir()) == []


def test_without_slurm_the_message_says_what_to_take(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbatch is not on the PATH .*--data\.engine=LocalEngine"):
        list(engine(tmp_path).run(Work(folder, {}), TASKS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"jobs": 0}, "jobs=0 is at least 1"),
        ({"poll_seconds": 0.0}, "poll_seconds=0.0 above 0"),
        ({"options": {"time": "1:00\nrm -rf /"}}, r"options has time='1:00\nrm"),
        ({"options": {"--mem": "4G"}}, "options has --mem='4G'"),
        ({"options": {"array": "0-9"}}, "options has array='0-9'"),
        ({"folder": "/a b"}, "folder is '/a b'"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ConfigError) as caught:
        SlurmEngine(**arguments)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_an_element_starts_without_what_takes_seconds():
    code = "import sys, datamodules.preparation.engines.slurm_engine; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pickle" in done.stdout
    assert not [name for name in HEAVY if f"'{name}'" in done.stdout]


def test_many_tasks_share_elements_and_the_places_in_the_queue_are_bounded():
    script = SlurmEngine(32, {"mem": "4G"}, "/shared/slurm").describe(50_000)
    assert "#SBATCH --array=0-127%32\n" in script
    assert "#SBATCH --mem=4G\n" in script
    assert "#SBATCH --array=0-999%999\n" in SlurmEngine(999).describe(50_000)
    elements = SlurmEngine(3)._elements(range(29))
    assert [index for element in elements for index in element] == list(range(29))
    assert {len(element) for element in elements} == {2, 3}


def test_prepare_shows_the_script_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = corpus(tmp_path / "in")
    words = ["prepare", "--config", "data/text", f"--data.source={source}", "--output", "out", "--dry-run"]
    assert main([*words, "--data.engine=SlurmEngine", "--data.engine.options={partition: cpu}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {source}: 1 tasks, ")
    assert "\n#SBATCH --partition=cpu\n" in shown
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["LocalEngine"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
