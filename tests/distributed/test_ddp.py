"""Two real gloo ranks give the loss curve, gradient norms and weights of one process."""

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from core.checkpoints import checkpoint
from core.testing.runs import run
from tests.distributed.killing import Moment, killer

HOUSE = Path(__file__).resolve().parents[2]

CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 6,
        "log_every_n_steps": 1,
        "val_check_interval": 6,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "callbacks": [{"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 3}}],
        "plugins": [{"class_path": "AtomicCheckpoint"}],
        "logger": [{"class_path": "MetricsCSV", "init_args": {"save_dir": "${run_folder}"}}],
    },
    "model": {
        "network": {
            "class_path": "GPT",
            "init_args": {
                "vocab_size": 64,
                "n_layer": 2,
                "n_head": 2,
                "n_embd": 16,
                "max_sequence_length": 16,
            },
        },
        "objective": "CausalLM",
        # gradient noise of 1e-8 would flip the sign of Adam's first steps where a gradient is zero in theory
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5, "momentum": 0.9}},
    },
    "data": {"class_path": "tests.distributed.uneven.UnevenData"},
}

LAUNCHES = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
                 "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "lightning": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "FSDP": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=FSDP"],
    "pipeline": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=HybridParallel",
                 "--trainer.strategy.pipeline=2"],
}  # fmt: skip
"""How users start two ranks; with strategies of ours too, which here import what they need by themselves."""

HOW_OFTEN = {"lightning": [pytest.mark.ci], "FSDP": [pytest.mark.ci], "pipeline": [pytest.mark.slow]}


def write(folder):
    """Writes the configuration; returns the arguments of a run in this folder."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return [f"--config={config}", f"--trainer.default_root_dir={folder / 'run'}"]


def launched(command, folder):
    """Trains as users start it."""
    words = write(folder)
    with open(folder / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)},
        )  # fmt: skip
        try:
            code = process.wait(timeout=120)
        finally:  # all ranks, whatever happened
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text(encoding="utf-8")[-3000:]
    return results(folder)


def forked(ranks, folder, *more, **how):
    """Trains in forked processes, which find what a launcher sets in their environment."""
    strategy = ["--trainer.strategy=ddp"] if ranks > 1 else []
    words = ["fit", *write(folder), f"--trainer.devices={ranks}", *strategy, *more]
    return run(words, folder, ranks=ranks, **how)


def results(folder):
    """Returns the figures by step and the last checkpoint."""
    with open(folder / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
        figures = {int(row["step"]): row for row in csv.DictReader(file)}
    return figures, checkpoint.read(checkpoint.newest(folder / "run"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    done = forked(1, folder)
    assert done.code == 0, done.complaint
    return results(folder)


def column(figures, name):
    [key] = [key for key in next(iter(figures.values())) if key.startswith(name)]
    return [float(row[key]) for _, row in sorted(figures.items()) if row[key]]


def assert_same_run(found, expected):
    # float32 sums in another order; differences grow over the steps, by far less than 1e-5
    assert column(found[0], "train/tokens") == column(expected[0], "train/tokens")
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(found[0], name) == pytest.approx(column(expected[0], name), rel=1e-5), name
        assert column(expected[0], name)
    for name, weight in expected[1]["state_dict"].items():
        torch.testing.assert_close(found[1]["state_dict"][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("launch", [pytest.param(name, marks=HOW_OFTEN.get(name, [])) for name in LAUNCHES])
def test_two_ranks_with_uneven_labels_are_one_process(one, launch, tmp_path):
    assert_same_run(launched(LAUNCHES[launch], tmp_path), one)


def test_two_ranks_leave_one_run_folder(tmp_path):
    for _ in range(2):
        done = forked(2, tmp_path, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
        assert done.code == 0, done.complaint
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run-2"]


def test_slurms_tasks_are_the_ranks(one, tmp_path):
    """With what srun sets for each task."""
    job = {"SLURM_JOB_ID": 12345, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2,
           "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": 1, "SLURM_NODEID": 0}  # fmt: skip
    places = [
        {name: str(value) for name, value in {**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}.items()}
        for rank in (0, 1)
    ]
    done = forked(2, tmp_path, environments=places)
    assert done.codes == (0, 0), done.complaint
    assert_same_run(results(tmp_path), one)


def test_sigterm_to_one_rank_ends_both_after_the_same_step(tmp_path):
    noting = [
        f"--trainer.callbacks+={{class_path: {name}, init_args: {{folder: {tmp_path}}}}}"
        for name in ("tests.distributed.uneven.LastStep", "tests.distributed.killing.Progress")
    ]
    endless = [
        "--trainer.max_steps=1000000",
        "--trainer.log_every_n_steps=7",
        "--trainer.limit_val_batches=0",
    ]
    with killer(tmp_path, Moment(rank=1, batches=9, delay_s=0.05, signal=signal.SIGTERM)) as ended:
        done = forked(2, tmp_path, *endless, *noting)
    assert ended, done.complaint
    assert done.codes == (143, 143), done.complaint
    one, two = (int((tmp_path / f"last_step.{rank}").read_text(encoding="utf-8")) for rank in (0, 1))
    assert one == two
    assert one % 7 == 0


def test_ranks_that_predict_nothing_say_so(tmp_path):
    words = [*write(tmp_path), "--data=tests.toy.ToyData", "--trainer.devices=2", "--trainer.strategy=ddp"]
    done = run(["predict", *words, "--trainer.limit_predict_batches=0"], tmp_path, ranks=2)
    assert done.codes == (2, 2)
    assert "Nothing was predicted" in done.told
    assert not list((tmp_path / "run").glob("predictions*"))
    done = run(["predict", *words], tmp_path, ranks=2)
    assert done.codes == (0, 0), done.complaint
    assert len(list(tmp_path.glob("run*/predictions.rank?.safetensors"))) == 2


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "FSDP", *(pytest.param(f"HybridParallel {kind}=2", id=kind) for kind in ("tensor", "pipeline"))],
)
def test_the_module_that_is_not_finite_is_named_also_where_weights_are_spread(strategy, tmp_path):
    name, *sizes = strategy.split()
    poison = ["--trainer.callbacks+=tests.distributed.poison.PoisonedSteps", "--trainer.callbacks.start=3"]
    chosen = [f"--trainer.strategy={name}", *(f"--trainer.strategy.{size}" for size in sizes)]
    words = ["fit", *write(tmp_path), "--trainer.devices=2", *chosen, *poison]
    done = run([*words, "--trainer.callbacks+=NonFiniteGuard"], tmp_path, ranks=2)
    assert done.code == 2, done.complaint
    assert "NonFiniteGuard: in step 3 the loss is" in done.complaint
    assert re.search(r"First found: the gradient that \S+ .*passes on going backward", done.complaint), (
        done.complaint
    )
