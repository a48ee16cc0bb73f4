"""From which checkpoint a job goes on that was started with one, and again."""

import os

import pytest
import torch

from plugins.checkpoints.checkpoint import defect
from plugins.cli.configuration.request import prepare
from plugins.cli.runs import restarts
from plugins.cli.runs.claims import CLAIM
from plugins.cli.runs.run_folder import own

JOB = "SLURM 7"


def write(run, step, age_s):
    """Writes a checkpoint that is so old."""
    path = run / "checkpoints" / f"step-{step}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "global_step": step, "pytorch-lightning_version": "2.6"}, path)
    assert defect(path) is None
    changed = (run.parent / "now").stat().st_mtime - age_s
    os.utime(path, (changed, changed))
    return path


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two checkpoints, in which a job went on later."""
    (tmp_path / "now").touch()
    folder = tmp_path / "run"
    write(folder, 100, age_s=90)
    write(folder, 200, age_s=80)
    (folder / "config.yaml").write_text("trainer: {}\n")
    own(folder, JOB)
    changed = (tmp_path / "now").stat().st_mtime - 70
    os.utime(folder / CLAIM, (changed, changed))
    return folder


def started_again(run, wanted, root="else", runs=None):
    return restarts.checkpoint(JOB, run.parent / root, str(wanted), runs or run.parent / root)


def test_a_checkpoint_that_was_named_is_not_replaced_by_one_that_lay_beside_it(run):
    wanted = run / "checkpoints" / "step-100.ckpt"
    assert started_again(run, wanted) is None
    mine = write(run, 110, age_s=60)
    assert started_again(run, wanted) == mine


def test_a_checkpoint_that_was_named_may_be_gone(run):
    wanted = run / "checkpoints" / "step-100.ckpt"
    mine = write(run, 110, age_s=60)
    wanted.unlink()
    assert started_again(run, wanted) == mine
    assert started_again(run, run) == mine  # named by its run folder


@pytest.mark.parametrize("options", [{"root": "run"}, {"runs": True}], ids=["of a config", "of all runs"])
def test_last_is_not_another_runs(run, options):
    if "runs" in options:
        options = {"runs": run.parent}
    write(run.parent / "run-2", 900, age_s=1)
    assert started_again(run, "last", **options) == run / "checkpoints" / "step-200.ckpt"
    mine = write(run, 210, age_s=60)
    assert started_again(run, "last", **options) == mine


def test_another_job_finds_nothing(run):
    assert restarts.checkpoint("SLURM 8", run, "last", run) is None
    assert restarts.checkpoint("SLURM 8", run, str(run), run) is None


@pytest.mark.parametrize(
    "values",
    [{}, {"trainer": None}, {"data": "tests.support.toy.ToyData"}, {"data": {"class_path": "tests.support.toy.ToyData", "init_args": None}}],
    ids=["nothing", "an empty section", "a class by its name", "without arguments"],
)  # fmt: skip
def test_a_job_may_leave_out_what_one_process_may(values, monkeypatch, write_yaml):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = write_yaml("config.yaml", values)
    alone = prepare([f"--config={config}"])
    assert prepare([f"--config={config}"], job="torchrun 7").arguments == alone.arguments
    auto = prepare([f"--config={config}", "--trainer.devices=auto"], job="torchrun 7")
    assert auto.arguments[-2:] == ["--trainer.devices=2", "--trainer.num_nodes=2"]


@pytest.mark.parametrize("options", [None, {}, {"batch_size": 8}, "foo"])
def test_the_global_batch_is_kept_whatever_the_config_leaves_out(options, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stored = {"trainer": {}, "data": {"class_path": "X", "init_args": {"batch_size": 8}}}
    values = {"trainer": {}, "data": {"class_path": "X", "init_args": options}}
    said = list(restarts.shape({"ranks": 4}, stored, values, []))
    assert said[2:] == ["--trainer.accumulate_grad_batches=2", "--data.batch_size=8"]
