"""`launch`: a script from a template; what it says is what the clusters' own tools understand."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.__main__ import main
from plugins.commands.launch import PATTERNS, as_container_arguments
from tests.conftest import HOUSE, TINY

FIT = ["fit", "--config", "my config.yaml", "--model.optimizer.lr=1e-3"]

PYTORCHJOB = json.loads(Path(__file__).with_name("pytorchjob.schema.json").read_text(encoding="utf-8"))
"""What a PyTorchJob may hold, as far as the template uses it: manifests/base/crds/kubeflow.org_pytorchjobs.yaml and
pkg/webhooks/pytorch/pytorchjob_webhook.go of kubeflow/training-operator 1.9. The API server drops fields that a
schema does not know; here they are mistakes."""


@pytest.fixture
def launch(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my config.yaml").write_text(yaml.safe_dump(TINY))

    def call(*words, code=0):
        assert main(["launch", *map(str, words)]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    return call


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is first on the PATH, whose programs note how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "sbatch", "kubectl"):
        (folder / name).write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" > said\necho "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >> said\n'
            'echo "$TORCHINDUCTOR_CACHE_DIR" > compiled\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("RDZV_ENDPOINT", raising=False)


def sbatch_options(script):
    """Returns what sbatch reads: the lines of #SBATCH before the first command."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    before = script.partition("\nset ")[0].splitlines()
    assert set(lines) <= set(before)
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def test_slurm(launch):
    script = launch(
        "--cluster=slurm", "--nodes=4", "--devices=2", "--name=big", "--time=2-00:00:00", "--dry-run", *FIT
    )
    options = sbatch_options(script)
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "2"
    assert (options["job-name"], options["time"]) == ("big", "2-00:00:00")
    assert options["signal"] == "USR1@180"
    assert "requeue" in options
    assert not {"cpus-per-task", "mem", "partition", "account"} & set(options)
    assert "SRUN_CPUS_PER_TASK" not in script
    assert "export TORCHINDUCTOR_CACHE_DIR=" in script
    words = shlex.split(script.splitlines()[-1])
    assert words[0] == "srun"
    assert words[words.index("core") + 1 :] == [*FIT, "--trainer.devices=2", "--trainer.num_nodes=4"]


def test_slurms_resources(launch):
    words = ["--cpus-per-task=12", "--mem=480G", "--partition=gpu,big-mem", "--account=lab.a"]
    script = launch("--cluster=slurm", "--devices=1", *words, "--dry-run", *FIT)
    options = sbatch_options(script)
    assert {f"--{key}={options[key]}" for key in ("cpus-per-task", "mem", "partition", "account")} == set(
        words
    )
    assert options["time"] == "24:00:00"
    assert "export SRUN_CPUS_PER_TASK=12 " in script  # srun takes none of sbatch's since SLURM 22.05


def program(folder, name, lines):
    """Puts a program of sh first on the PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(HOUSE)}


@pytest.fixture
def task(launch, tmp_path):
    """Does what SLURM does with a task of a sweep's script: `srun` gets the words after `python`, or runs them."""
    core = f'shift 2; exec {shlex.quote(sys.executable)} "$@"'

    def call(script, number, srun=core):
        environment = program(tmp_path, "srun", srun) | {"SLURM_ARRAY_TASK_ID": str(number)}
        return subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return call


SWEEP = ("--cluster=slurm", "--devices=1", "--sweep=rates.yaml", "--dry-run")


def test_each_task_of_a_sweep_has_words_and_a_folder_of_its_own(launch, task, tmp_path):
    values = {"config": ["a.yaml", "$(touch pwned)"], "model.x": [{"b": [1]}, "é' \n{{name}}"]}
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(values))
    script = launch(*SWEEP, "--no-check", *FIT, "--trainer.default_root_dir=my runs")
    assert sbatch_options(script)["array"] == "0-3"
    folders = []
    for number, (config, x) in enumerate(itertools.product(*values.values())):
        done = task(script, number, 'printf "%s\\0" "$LEYDEN_JOB" "$@"')
        job, *words, folder, end = done.stdout.split("\0")
        text = x if isinstance(x, str) else json.dumps(x)
        assert words[words.index("core") + 1 :] == [
            *FIT, "--trainer.devices=1", "--trainer.num_nodes=1", f"--config={config}", f"--model.x={text}"
        ]  # fmt: skip
        assert (folder, end) == (f"--trainer.default_root_dir={job}", "")
        folders.append(job)
    assert len(set(folders)) == 4
    assert {Path(folder).parent for folder in folders} == {Path("my runs")}
    assert not (tmp_path / "pwned").exists()
    # a sweep with more values finds its trials again
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(values | {"config": ["new.yaml", *values["config"]]}))
    more = launch(*SWEEP, "--no-check", *FIT, "--trainer.default_root_dir=my runs")
    assert all(shlex.quote(folder) in more for folder in folders)


@pytest.mark.slow
def test_a_sweep_is_done_once_however_often_it_is_submitted(launch, task, tmp_path, capsys):
    config = deepcopy(TINY)
    fails = {
        "class_path": "tests.support.killing.FailsOnce",
        "init_args": {"folder": str(tmp_path), "step": 4},
    }
    config["trainer"]["callbacks"].append(fails)
    config["trainer"]["logger"] = [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}]
    (tmp_path / "my config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "rates.yaml").write_text("model.optimizer.lr: [0.01, 1.0e-3]\n")
    script = launch(*SWEEP, *FIT[:3])
    first = task(script, 0)
    assert first.returncode == 2, first.stderr
    again = task(script, 0)
    assert again.returncode == 0, again.stderr
    assert "step-00000004.ckpt" in again.stdout
    third = task(script, 0, "exit 1")
    assert (third.returncode, third.stdout.endswith(": done\n")) == (0, True)
    other = task(script, 1)
    assert other.returncode == 0, other.stderr
    folders = sorted(map(str, (tmp_path / "runs" / "rates").glob("lr*")))
    assert len(folders) == 2
    capsys.readouterr()
    assert main(["compare", *folders]) == 0
    assert "0.001" in capsys.readouterr().out


def test_a_task_leaves_a_trial_alone_that_another_trains(launch, task, tmp_path):
    (tmp_path / "rates.yaml").write_text("model.optimizer.lr: [0.01]\n")
    script = launch(*SWEEP, "--no-check", *FIT)
    begin = script.rpartition("srun ")[0]  # in place of the training, the same task once more
    done = task(f"{begin}bash -c {shlex.quote(script)} || exit 2", 0, "exit 1")
    assert (done.returncode, done.stdout.endswith(": another process is training this run\n")) == (0, True)


IN_TURN = ("--cluster=torchrun", "--devices=1", "--sweep=rates.yaml", "--dry-run")


def test_without_a_cluster_trials_are_trained_one_after_the_other(launch, tmp_path):
    (tmp_path / "rates.yaml").write_text("model.optimizer.lr: [0.1, 0.2, 0.3]\nseed_everything: [7]\n")
    script = launch(*IN_TURN, "--no-check", *FIT)
    fails = 'printf "%s " "$LEYDEN_JOB" "$@" >> said; echo >> said; case "$*" in *lr=0.2*) exit 3 ;; esac'
    environment = program(tmp_path, "torchrun", fails)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment)
    assert done.returncode == 3  # of the second; the third is trained all the same
    lines = (tmp_path / "said").read_text().splitlines()
    for line, rate in zip(lines, ("0.1", "0.2", "0.3"), strict=True):
        job, *words = line.split()
        own = [f"--model.optimizer.lr={rate}", "--seed_everything=7", f"--trainer.default_root_dir={job}"]
        assert words[-4:] == ["--trainer.devices=auto", *own]
    (tmp_path / "sizes.yaml").write_text("trainer.devices: [2, 4]\n")
    message = launch("--cluster=torchrun", "--devices=1", "--sweep=sizes.yaml", "--no-check", *FIT, code=2)
    assert "--trainer.devices=2 is not what is started" in message
    assert "leave --nodes out" in launch(*IN_TURN, "--nodes=2", *FIT, code=2)
    (tmp_path / "own.template").write_text("torchrun -m core {{command}}\n")
    assert "it lacks {{trials}}" in launch("--cluster=own.template", *IN_TURN[1:], *FIT, code=2)


@pytest.mark.slow
def test_torchrun_trains_a_sweep_once(launch, tmp_path):
    (tmp_path / "rates.yaml").write_text("model.optimizer.lr: [0.01, 1.0e-3]\n")
    script = launch("--cluster=torchrun", "--devices=2", *IN_TURN[2:], *FIT[:3])
    environment = program(
        tmp_path, "torchrun", f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"'
    )
    printed = []
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].count("\nDDP ") == 2  # of two ranks each
    assert [line.endswith(": done") for line in printed[1].splitlines()] == [True, True]
    ends = sorted(tmp_path.glob(f"runs/rates/lr*/checkpoints/step-{TINY['trainer']['max_steps']:08d}.ckpt"))
    assert [path.parts[-3].partition("-")[0] for path in ends] == ["lr=0.001", "lr=0.01"]


@pytest.mark.parametrize("through_launch", [False, True])
def test_a_signal_ends_the_trial_and_the_sweep(through_launch, launch, tmp_path):
    (tmp_path / "rates.yaml").write_text("model.optimizer.lr: [0.1, 0.2]\n")
    words = ["--cluster=torchrun", "--devices=1", "--sweep=rates.yaml", "--no-check"]
    waits = "trap 'echo ended >> said; exit 1' TERM\necho begun >> said\nsleep 60 & wait"
    environment = program(tmp_path, "torchrun", waits)
    (tmp_path / "sweep.sh").write_text(launch(*words, "--dry-run", *FIT))
    command = ["bash", "sweep.sh"]
    if through_launch:
        command = [sys.executable, "-m", "core", "launch", *words, *FIT]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment)
    end = time.monotonic() + 60
    while not (tmp_path / "said").exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert (tmp_path / "said").read_text() == "begun\nended\n"


def test_in_kubernetes_each_trial_is_a_job(launch, tmp_path):
    (tmp_path / "rates.yaml").write_text('model.optimizer.lr: [0.1]\nconfig: ["$(HOME).yaml", b.yaml]\n')
    words = ("--cluster=kubernetes", "--name=rates", "--sweep=rates.yaml", "--no-check", "--dry-run")
    jobs = list(yaml.safe_load_all(launch(*words, *FIT)))
    for job, config in zip(jobs, ("$$(HOME).yaml", "b.yaml"), strict=True):
        jsonschema.validate(job, PYTORCHJOB)
        name = job["metadata"]["name"]
        assert job["spec"]["elasticPolicy"]["rdzvId"] == name
        [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        *shared, rate, own, folder, devices = container["args"]
        assert (shared, rate, devices) == (FIT, "--model.optimizer.lr=0.1", "--trainer.devices=auto")
        assert own == f"--config={config}"
        assert folder.startswith("--trainer.default_root_dir=runs/rates/")
    (tmp_path / "more.yaml").write_text((tmp_path / "rates.yaml").read_text())
    others = list(yaml.safe_load_all(launch(*words, "--sweep=more.yaml", *FIT)))  # in another folder
    assert len({job["metadata"]["name"] for job in jobs + others}) == 4


def test_prepare_submits_its_own_array_jobs_with_the_options_of_launch(launch, tmp_path, capsys):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "one.txt").write_text("One text.\n" * 50)
    words = ("--nodes=16", "--partition=cpu,big", "--time=2:00:00", "--cpus-per-task=2", "prepare")
    message = launch("--cluster=slurm", *words, "--config=data/text", "--data.source=a b", code=2)
    assert len(message.splitlines()) <= 10
    [line] = [line for line in message.splitlines() if line.startswith("  python -m core prepare")]
    assert main([*shlex.split(line)[3:], "--dry-run"]) == 0
    options = sbatch_options(capsys.readouterr().out)
    assert options["array"].endswith("%16")
    assert (options["partition"], options["time"], options["cpus-per-task"]) == ("cpu,big", "2:00:00", "2")


def test_kubernetes(launch):
    words = ["--nodes=3", "--least-nodes=2", "--devices=8", "--image=registry/x:1"]
    job = yaml.safe_load(launch("--cluster=kubernetes", *words, "--dry-run", *FIT))
    jsonschema.validate(job, PYTORCHJOB)
    elastic = job["spec"]["elasticPolicy"]
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == (2, 3)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 3
    [container] = worker["template"]["spec"]["containers"]
    assert container["args"] == [*FIT, "--trainer.devices=auto"]
    assert container["image"] == "registry/x:1"
    kept = {one["name"]: one["value"] for one in container["env"]}["TORCHINDUCTOR_CACHE_DIR"]
    assert any(kept.startswith(f"{one['mountPath']}/") for one in container["volumeMounts"][:1])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize("word", ["on", "null", "e3", "true", "y", "x--1"])
def test_a_name_stays_a_text_in_kubernetes(word, launch):
    volume = "1e3" if word == "e3" else "0"
    job = yaml.safe_load(launch("--cluster=kubernetes", f"--name={word}", f"--image={word}", f"--volume={volume}",
                                "--devices=1", "--dry-run", "--no-check", *FIT))  # fmt: skip
    jsonschema.validate(job, PYTORCHJOB)
    assert job["metadata"]["name"] == word


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job["metadata"].update(name=True),
        lambda job: job["metadata"].update(name="4you"),
        lambda job: job["spec"].update(nprocPerNode=8),
        lambda job: job["spec"]["elasticPolicy"].update(minReplica=1),
        lambda job: job["spec"]["elasticPolicy"].update(rdzvBackend="c10"),
        lambda job: job["spec"]["pytorchReplicaSpecs"].update(Chief={}),
        lambda job: job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].update(name="a"),
    ],
)  # fmt: skip
def test_the_schema_refuses_what_the_operator_refuses(change, launch):
    job = yaml.safe_load(launch("--cluster=kubernetes", "--no-check", "--dry-run", *FIT))
    change(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, PYTORCHJOB)


def expanded(text, variables):
    """Expands as a kubelet does: $$ is a dollar, $(NAME) a variable, and all else stays."""

    def value(found):
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((.*?)\)", value, text, flags=re.DOTALL)


WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
                 | st.sampled_from(["$(HOME)", "$$(HOME)", "a$", "$$", "$(", "é\u2028\x85\ufeff😀", "- x: {y", "'\"\\n"]))  # fmt: skip


@given(WORDS)
def test_a_containers_arguments_are_the_words(words):
    read = yaml.safe_load(f"args: {as_container_arguments(words)}\nresources: 1\n")
    assert [expanded(word, {"HOME": "pwned"}) for word in read["args"]] == words
    assert read["resources"] == 1


@given(WORDS)
def test_a_shells_words_are_the_words(words):
    # what the template's line is made with; bash itself is asked below
    assert shlex.split(shlex.join(words)) == words


def test_torchruns_script_runs_what_it_says(launch, tools, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/.cache")
    words = [
        "--nodes=2",
        "--least-nodes=1",
        "--devices=4",
        "--name=job7",
        "--rdzv-endpoint=node-3.local:29400",
    ]
    launch("--cluster=torchrun", *words, *FIT)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[-1] == "1"
    assert {"--nnodes=1:2", "--nproc_per_node=4", "--max-restarts=3", "--rdzv_id=job7"} <= set(said)
    assert "--rdzv_endpoint=node-3.local:29400" in said
    assert said[said.index("core") + 1 : -1] == [*FIT, "--trainer.devices=auto"]
    assert (tmp_path / "job7.sh").is_file()
    assert (tmp_path / "compiled").read_text() == "/home/me/.cache/leyden/compiled\n"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/shared/compiled")
    launch("--cluster=torchrun", "--name=job8", "--rdzv-endpoint=here:1", *FIT)
    assert (tmp_path / "compiled").read_text() == "/shared/compiled\n"


def test_several_machines_need_a_place_to_meet(launch, tools, tmp_path, monkeypatch):
    many = ("--cluster=torchrun", "--nodes=2", "--no-check")
    assert "give --rdzv-endpoint=HOST:PORT" in launch(*many, *FIT, code=2)
    assert not (tmp_path / "leyden.sh").exists()
    (tmp_path / "written.sh").write_text(launch(*many, "--dry-run", *FIT))
    alone = subprocess.run(["bash", "written.sh"], capture_output=True, text=True)
    assert alone.returncode != 0
    assert "RDZV_ENDPOINT: set it to HOST:PORT" in alone.stderr
    assert not (tmp_path / "said").exists()
    monkeypatch.setenv("RDZV_ENDPOINT", "a:1; touch pwned")
    launch(*many, *FIT)
    assert "--rdzv_endpoint=a:1; touch pwned" in (tmp_path / "said").read_text().splitlines()
    assert not (tmp_path / "pwned").exists()


def test_two_runs_on_one_machine_do_not_meet(launch):
    assert '--rdzv_endpoint="localhost:0"' in launch("--cluster=torchrun", "--no-check", "--dry-run", *FIT)


@pytest.mark.parametrize(("cluster", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_what_is_submitted(cluster, tool, launch, tools, tmp_path):
    shown = launch(f"--cluster={cluster}", "--output=-x", "--devices=1", *FIT)
    assert shown.splitlines()[-1].split()[0::99] == ["+"]
    assert (tmp_path / "said").read_text().splitlines()[-2] == "./-x"
    assert (tmp_path / "-x").read_text() == launch(f"--cluster={cluster}", "--devices=1", "--dry-run", *FIT)


def test_a_copy_of_a_template_is_for_the_same_cluster(launch, tmp_path, monkeypatch):
    shipped = (HOUSE / "configs" / "cluster" / "slurm.sh.template").read_text(encoding="utf-8")
    (tmp_path / "mine.sh.template").write_text(shipped, encoding="utf-8")
    words = ("--nodes=4", "--dry-run", "--no-check", *FIT)
    assert launch("--cluster=mine.sh.template", *words) == launch("--cluster=slurm", *words)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not installed here" in launch("--cluster=mine.sh.template", *FIT, code=2)


def test_what_somebody_wrote_stays(launch):
    words = ("--cluster=slurm", "--dry-run", *FIT, "--trainer.devices", "3")
    assert "--trainer.devices 3 --trainer.num_nodes=1" in launch("--devices=3", *words)
    message = launch("--devices=8", *words, code=2)
    assert "--trainer.devices=3 is not what is started, --devices=8" in message


def test_ones_own_template(launch, tmp_path):
    (tmp_path / "mine.sh.template").write_text("bsub -J {{name}} -n {{nodes}} {{command}}\nmem {{mem}}\n")
    words = ("--cluster=mine.sh.template", "--no-check", "--nodes=2", "--dry-run")
    assert launch(*words, "fit") == "bsub -J leyden -n 2 fit --trainer.devices=auto\n"
    assert launch(*words, "--mem=4G", "--", "fit").splitlines()[1] == "mem 4G"
    (tmp_path / "mine.sh.template").write_text("# one\nbsub -n {{node}}\n")
    assert "mine.sh.template:2: there is no {{node}}. Did you mean nodes?" in launch(*words, "fit", code=2)
    (tmp_path / "mine.sh.template").write_bytes(b"\xff\xfe")
    assert "this is no template" in launch(*words, "fit", code=2)


def test_the_command_is_checked_before_anything_is_written(launch, tools, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert "Did you mean quickstart?" in launch("--cluster=slurm", "fit", "--config=quickstrat", code=2)
    assert "lr" in launch("--cluster=slurm", *FIT[:3], "--model.optimizer.lrr=1", code=2)
    strategy = "--trainer.strategy={class_path: HybridParallel, init_args: {data_shard: 3}}"
    message = launch("--cluster=slurm", "--nodes=2", "--devices=1", *FIT, strategy, code=2)
    assert "2" in message
    assert "3" in message
    assert sorted(tmp_path.iterdir()) == before
    assert launch("--cluster=slurm", "--no-check", "--dry-run", "fit", "--config=there/alone")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster=slrum", "fit"], "Did you mean slurm?"),
        (["--cluster=slurm"], "comes a command"),
        (["--cluster=slurm", "--"], "comes a command"),
        (["fit"], "required: --cluster"),
        ([*FIT, "--cluster", "slurm"], "launch: --cluster is after the command"),
        (["--cluster=slurm", *FIT, "--nodes=2"], "launch: --nodes is after the command"),
        (["--cluster=slurm", "--", "rm", "-rf", "."], "'rm' cannot be launched"),
        (["--cluster=torchrun", "prepare", "--config=quickstart"], "--data.engine=RayEngine on several machines"),
        (["--cluster=slurm", "validte"], "Did you mean validate?"),
        (["--cluster=slurm", "fit", "--help"], "Call `python -m core fit --help` here"),
        (["--cluster=slurm", "fit", "--print_config=plain"], "only prints something"),
        (["--cluster=slurm", "--nodes=0", "fit"], "--nodes is 0, not 1 to"),
        (["--cluster=slurm", "--nodes=1" + "0" * 30, "fit"], "--nodes is 1000"),
        (["--cluster=slurm", "--devices=-1", "fit"], "--devices is -1"),
        (["--cluster=slurm", "--cpus-per-task=0", "fit"], "--cpus-per-task is 0"),
        (["--cluster=torchrun", "--max-restarts=-1", "fit"], "--max-restarts is -1"),
        (["--cluster=torchrun", "--nodes=2", "--least-nodes=3", "fit"], "--least-nodes is 3, --nodes only 2"),
        (["--cluster=slurm", "--least-nodes=1", "fit"], "--least-nodes would have no effect: slurm.sh.template has no"),
        (["--cluster=slurm", "--image=x", "fit"], "--image would have no effect"),
        (["--cluster=kubernetes", "--partition=x", "fit"], "--partition would have no effect"),
        (["--cluster=kubernetes", "--name=4you", "fit"], "begins with a letter and has at most 54"),
        (["--cluster=kubernetes", "--name=" + "a" * 55, "fit"], "begins with a letter and has at most 54"),
        (["--cluster=kubernetes", "--volume=a..b", "fit"], "--volume is 'a..b', not the name of a persistent"),
        (["--cluster=torchrun", "--rdzv-endpoint=node", "fit"], "--rdzv-endpoint is 'node', not HOST:PORT"),
        (["--cluster=torchrun", "--rdzv-endpoint=node:65536", "fit"], "with a port from 0 to 65535"),
        (["--cluster=slurm", "--sweep=my config.yaml", *FIT], "my config.yaml is no sweep"),
        (["--cluster=slurm", "--sweep=none.yaml", *FIT], "none.yaml cannot be read"),
        (["--cluster=slurm", "--sweep=my config.yaml", "validate"], "--sweep has trials of fit, not of validate"),
        (["--cluster=slurm", "--sweep=my config.yaml", *FIT, "--ckpt_path=last"], "leave --ckpt_path out"),
        (["--cluster=slurm", "--time=soon", "fit"], "--time"),
        (["--cluster=slurm", "--time=1²:00", "fit"], "--time"),
        (["--cluster=slurm", "--mem=lots", "fit"], "--mem"),
        (["--cluster=slurm", "--nodes=two", "fit"], "two"),
        (["--cluster=.", "fit"], "there is no such template"),
        (["--cluster=" + "x" * 500, "fit"], "there is no such template"),
        (["--cluster=slurm", "--no-check", "--output=.", *FIT], "cannot be written"),
        (["--cluster=slurm", "--no-check", "--output=my config.yaml/x", *FIT], "cannot be written"),
        (["--cluster=slurm", "--no-check", "--output=" + "x" * 300, *FIT], "cannot be written"),
    ],
)  # fmt: skip
def test_mistakes(words, said, launch, tools, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    message = launch(*words, code=2)
    assert said in message
    assert len(message.splitlines()) <= 10
    assert sorted(tmp_path.rglob("*")) == before


HOSTILE = ("a b", "a;b", "$(touch pwned)", "`touch pwned`", "a\nb", "a\n#SBATCH --wrap=x", 'a"b', "a'b", "a\\", "-x", "é",
           "", "{{command}}", "a: b", "$HOME", "1\n", "*", "a#b", "%j")  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("cluster", ["torchrun", "slurm", "kubernetes"])
def test_no_option_says_more_than_its_value(cluster, name, launch):
    for value in HOSTILE:
        option = f"--{name.replace('_', '-')}={value}"
        message = launch(f"--cluster={cluster}", option, "--no-check", "--dry-run", *FIT, code=2)
        assert message.startswith(f"launch: --{name.replace('_', '-')} is"), (option, message)


def test_a_missing_tool_is_named(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    message = launch("--cluster=slurm", "--no-check", *FIT, code=2)
    assert message.startswith("sbatch is not installed here")
    assert (tmp_path / "leyden.sh").is_file()


def test_a_script_that_a_signal_ends(launch, tools, tmp_path):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    launch("--cluster=slurm", "--no-check", *FIT, code=137)


def test_words_of_a_command_stay_words(launch):
    words = ("fit", "--config", "a; touch pwned $(touch pwned)", "--x=\n$HOME")
    script = launch("--cluster=slurm", "--no-check", "--dry-run", *words)
    line = script.partition("\nsrun ")[2]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[4:8] == list(words)


def test_mistakes_and_scripts_are_there_without_torch(tmp_path):
    source = (
        "import sys; from core.__main__ import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'lightning', 'numpy', 'jsonargparse'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    words = ["launch", "--cluster=slurm", "--no-check", "--dry-run", *FIT]
    done = subprocess.run([sys.executable, "-c", source, *words], cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
