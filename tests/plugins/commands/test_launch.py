"""`launch`: a script from a template; what it says is what the clusters' own tools understand."""

import os
import shlex
import subprocess

import pytest
import yaml

from core.__main__ import main
from tests.conftest import HOUSE

FIT = ["fit", "--config", "my config.yaml", "--model.optimizer.lr=1e-3"]


@pytest.fixture
def launch(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*words, code=0):
        assert main(["launch", *map(str, words)]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    return call


def test_slurm(launch):
    script = launch(
        "--cluster=slurm", "--nodes=4", "--devices=2", "--name=big", "--time=2-00:00:00", "--dry-run", *FIT
    )
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if "#SBATCH" in line[:8]
    )
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "2"
    assert (options["job-name"], options["time"]) == ("big", "2-00:00:00")
    assert options["signal"] == "USR1@180"
    assert "requeue" in options
    words = shlex.split(script.splitlines()[-1])
    assert words[0] == "srun"
    assert words[words.index("core") + 1 :] == [*FIT, "--trainer.devices=2", "--trainer.num_nodes=4"]


def test_kubernetes(launch):
    job = yaml.safe_load(
        launch(
            "--cluster=kubernetes",
            "--nodes=3",
            "--least-nodes=2",
            "--devices=8",
            "--image=registry/x:1",
            "--dry-run",
            *FIT,
        )
    )
    assert job["kind"] == "PyTorchJob"
    assert (job["spec"]["elasticPolicy"]["minReplicas"], job["spec"]["elasticPolicy"]["maxReplicas"]) == (
        2,
        3,
    )
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 3
    [container] = worker["template"]["spec"]["containers"]
    assert container["args"] == [*FIT, "--trainer.devices=auto"]
    assert container["image"] == "registry/x:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_torchruns_script_runs_what_it_says(launch, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "torchrun").write_text(
        '#!/bin/sh\necho "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" > said\nprintf "%s\\n" "$@" >> said\n'
    )
    (tools / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    launch("--cluster=torchrun", "--nodes=2", "--least-nodes=1", "--devices=4", "--name=job7", *FIT)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == "1"
    assert {"--nnodes=1:2", "--nproc_per_node=4", "--max-restarts=3", "--rdzv_id=job7"} <= set(said)
    assert said[said.index("core") + 1 :] == [*FIT, "--trainer.devices=auto"]
    assert (tmp_path / "job7.sh").is_file()


def test_a_copy_of_a_template_is_for_the_same_cluster(launch, tmp_path, monkeypatch):
    shipped = (HOUSE / "configs" / "cluster" / "slurm.sh.template").read_text(encoding="utf-8")
    (tmp_path / "mine.sh.template").write_text(shipped, encoding="utf-8")
    words = ("--nodes=4", "--dry-run", *FIT)
    assert launch("--cluster=mine.sh.template", *words) == launch("--cluster=slurm", *words)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not installed here" in launch("--cluster=mine.sh.template", *FIT, code=2)


def test_what_somebody_wrote_stays(launch):
    script = launch("--cluster=slurm", "--dry-run", *FIT, "--trainer.devices=3")
    assert "--trainer.devices=3 --trainer.num_nodes=1" in script


def test_ones_own_template(launch, tmp_path):
    (tmp_path / "mine.sh.template").write_text("bsub -J {{name}} -n {{nodes}} {{command}}\n")
    assert (
        launch("--cluster=mine.sh.template", "--nodes=2", "--dry-run", "fit")
        == "bsub -J leyden -n 2 fit --trainer.devices=auto\n"
    )
    (tmp_path / "mine.sh.template").write_text("# one\nbsub -n {{node}}\n")
    assert "mine.sh.template:2: there is no {{node}}. Did you mean nodes?" in launch(
        "--cluster=mine.sh.template", "--dry-run", "fit", code=2
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster=slrum", "fit"], "Did you mean slurm?"),
        (["--cluster=slurm"], "comes a command"),
        (["fit"], "--cluster"),
        (["--cluster=slurm", "--nodes=0", "fit"], "--nodes"),
        (["--cluster=slurm", "--nodes=2", "--least-nodes=3", "fit"], "--least-nodes"),
        (["--cluster=slurm", "--name=a b; rm -rf /", "fit"], "--name"),
        (["--cluster=slurm", "--time=soon", "fit"], "--time"),
        (["--cluster=kubernetes", "--image=x\n  evil: 1", "fit"], "--image"),
        (["--cluster=slurm", "--nodes=two", "fit"], "two"),
    ],
)
def test_mistakes(words, said, launch, tmp_path):
    message = launch(*words, code=2)
    assert said in message
    assert len(message.splitlines()) <= 10
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tool_is_named(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    message = launch("--cluster=slurm", *FIT, code=2)
    assert message.startswith("sbatch is not installed here")
    assert (tmp_path / "leyden.sh").is_file()


def test_words_of_a_command_stay_words(launch):
    script = launch("--cluster=slurm", "--dry-run", "fit", "--config", "a; touch pwned $(touch pwned)")
    line = script.splitlines()[-1]
    done = subprocess.run(
        ["bash", "-c", line.replace("srun", "echo", 1)], capture_output=True, text=True, check=True
    )
    assert "a; touch pwned $(touch pwned)" in done.stdout
