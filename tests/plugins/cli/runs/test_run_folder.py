"""Which folder a run or a job has, and what is left of it."""

import os

import pytest

from conformance.runs import run
from conformance.workshop import workshop
from core import durable
from core.errors import ConfigError
from plugins.cli.runs import restarts, run_folder
from plugins.cli.runs.claims import CLAIM
from plugins.cli.runs.run_folder import Claim, claimed, fresh, of_job, own, present


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_job_finds_its_folder_again_among_the_numbered_ones_alone(tmp_path):
    root = tmp_path / "z[1]"
    first, second = fresh(root, job="a"), fresh(root, job="b")
    assert (first.name, second.name) == ("z[1]", "z[1]-2")
    other = fresh(tmp_path / "z[1]-large", job="c")
    assert fresh(root, job="b") == of_job(root, "b") == second
    assert fresh(root, job="a") == first
    assert of_job(root, "c") is None
    assert of_job(other, "c") == other


def test_a_folder_becomes_a_jobs_once(tmp_path):
    own(tmp_path, "a")
    os.utime(tmp_path / CLAIM, ns=(7, 7))
    own(tmp_path, "a")
    assert run_folder.claimed_at_ns(tmp_path) == 7
    own(tmp_path, "b")
    assert run_folder.claimed_at_ns(tmp_path) > 7


def test_a_claim_that_cannot_be_written_blocks_no_folder(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(durable, "write", full)
    with pytest.raises(ConfigError, match="cannot be made: No space left on device"):
        fresh(tmp_path / "run", job="a")
    assert fresh(tmp_path / "run", claim=False) == tmp_path / "run"


@pytest.mark.parametrize("failure", [ConfigError("wrong"), RuntimeError(), KeyboardInterrupt()])
def test_what_the_user_keeps_in_the_folder_stays(tmp_path, failure):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "config.yaml").write_text("mine")
    claim = claimed(fresh(folder), [folder, *folder.parents])
    (folder / "techniques.txt").write_text("of the run")
    claim.release(failure)
    assert names(folder) == ["config.yaml"]
    assert (folder / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("failure", "job", "left"),
    [
        (None, "a", False),
        (ConfigError("a wrong value"), None, False),
        (ConfigError("a wrong value"), "a", False),  # it would meet it again
        (RuntimeError("a peer is gone"), None, False),
        (RuntimeError("a peer is gone"), "a", True),
    ],
)
def test_a_run_that_left_nothing_but_its_record(tmp_path, failure, job, left):
    there = present(tmp_path / "new" / "run")
    claim = claimed(fresh(tmp_path / "new" / "run", job=job), there)
    if failure:
        (claim.folder / "config.yaml").write_text("of the run")
    claim.release(failure, job)
    assert (of_job(claim.folder, "a") is not None) == left
    assert (tmp_path / "new").exists() == left


def test_a_start_that_was_cut_off_leaves_nothing_to_the_next(tmp_path):
    root = tmp_path / "run"
    fresh(root, job="a")
    there = present(root)
    claimed(fresh(root, job="a"), there).release(ConfigError("a wrong value"), "a")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_what_ended_a_run_is_told_also_where_its_folder_cannot_be_read(tmp_path, monkeypatch, error):
    def fails(folder):
        raise error

    claim = claimed(fresh(tmp_path / "run"), present(tmp_path / "run"))
    monkeypatch.setattr(run_folder, "_names", fails)
    claim.release(RuntimeError("can't allocate memory"))
    assert not (tmp_path / "run" / CLAIM).exists()


def test_an_empty_folder_of_the_users_stays(tmp_path):
    """A mistake that is found after the folder has been chosen, in the empty folder that was given for it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for folder, stays in ((mine, True), (tmp_path / "new" / "run", False)):
        words = ["fit", "--config=quickstart", f"--trainer.default_root_dir={folder}"]
        done = run([*words, f"--data.source={tmp_path / 'nothing'}"], workshop())
        assert done.code == 2
        assert str(tmp_path / "nothing") in done.stderr
        assert folder.exists() == stays
        assert folder.parent.exists() == stays
    assert not list(mine.iterdir())


@pytest.mark.parametrize("failure", [ConfigError("No space left on device"), RuntimeError()])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_job_that_has_begun_keeps_its_folder(tmp_path, failure, resumed):
    folder = fresh(tmp_path / "run", job="a")
    claim = Claim(folder) if resumed else claimed(folder, present(tmp_path))
    (folder / "checkpoints").mkdir()
    claim.release(failure, "a")
    assert of_job(folder, "a") == folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "job7"}, "torchrun job7"),
        ({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train"}, "SLURM 12"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "SLURM 12_3"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "12", "LEYDEN_JOB": "runs/a"}, "LEYDEN_JOB runs/a"),
    ],
)  # fmt: skip
def test_a_job_has_a_name_from_its_launcher_and_its_arguments(environment, expected, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name == "GROUP_WORLD_SIZE":
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    low, again, high = (restarts.job(["--config=a", f"--model.optimizer.lr={lr}"]) for lr in (1, 1, 2))
    if expected is None:
        assert low is None
        return
    assert low.startswith(expected + ",")
    assert low == again != high
