"""Two real gloo ranks give the loss curve, gradient norms and weights of one process."""

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from core.checkpoints import checkpoint

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

ONE = [sys.executable, "-m", "core", "fit", "--trainer.devices=1"]
LAUNCHES = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
                 "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "lightning": [sys.executable, "-m", "core", "fit", "--trainer.devices=2", "--trainer.strategy=ddp"],
}  # fmt: skip


def run(command, folder, *more):
    config = folder / "config.yaml"
    folder.mkdir(exist_ok=True)
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    root = f"--trainer.default_root_dir={folder / 'run'}"
    with open(folder / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, f"--config={config}", root, *more], cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)},
        )  # fmt: skip
        try:
            code = process.wait(timeout=120)
        finally:  # all ranks, whatever happened
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text(encoding="utf-8")[-3000:]
    return results(folder)


def results(folder):
    """Returns the figures by step and the last checkpoint."""
    with open(folder / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
        figures = {int(row["step"]): row for row in csv.DictReader(file)}
    return figures, checkpoint.read(checkpoint.newest(folder / "run"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(ONE, tmp_path_factory.mktemp("one"))


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


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_with_uneven_labels_are_one_process(one, launch, tmp_path):
    assert_same_run(run(LAUNCHES[launch], tmp_path), one)


def test_two_ranks_leave_one_run_folder(tmp_path):
    run(LAUNCHES["torchrun"], tmp_path, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
    run(LAUNCHES["torchrun"], tmp_path, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run-2"]


def start(places, folder, *words):
    """Starts a process for each rank with the environment variables that a launcher would set."""
    ranks, logs = [], []
    for rank, place in enumerate(places):
        logs.append(open(folder / f"log.{rank}", "w+", encoding="utf-8"))  # noqa: SIM115
        ranks.append(subprocess.Popen(
            [sys.executable, "-m", "core", "fit", "--config=config.yaml", "--trainer.devices=2",
             "--trainer.strategy=ddp", "--trainer.default_root_dir=run", *words],
            cwd=folder, stdout=logs[-1], stderr=logs[-1],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOUSE)} | {k: str(v) for k, v in place.items()},
        ))  # fmt: skip
    return ranks, logs


def test_slurms_tasks_are_the_ranks(one, tmp_path):
    """With what srun sets for each task; the command is the README's."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    places = [
        {"SLURM_JOB_ID": 12345, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2,
         "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": 1, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}
        for rank in (0, 1)
    ]  # fmt: skip
    ranks, logs = start(places, tmp_path)
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], [Path(log.name).read_text(encoding="utf-8")[-2000:] for log in logs]
    assert_same_run(results(tmp_path), one)


def test_sigterm_to_one_rank_ends_both_after_the_same_step(tmp_path):
    """torchrun's ranks, started by hand, so that the signal reaches rank 1 alone."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        for rank in (0, 1)
    ]  # fmt: skip
    words = ["--trainer.max_steps=1000000", "--trainer.log_every_n_steps=7", "--trainer.limit_val_batches=0"]
    ranks, logs = start(places, tmp_path, *words, "--trainer.callbacks+=tests.distributed.uneven.LastStep")
    try:
        deadline = time.monotonic() + 90
        while not list(tmp_path.glob("run/checkpoints/*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)
        codes = [process.wait(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    text = [Path(log.name).read_text(encoding="utf-8") for log in logs]
    steps = [line for part in text for line in part.splitlines() if line.startswith("LAST_STEP")]
    assert codes == [143, 143], text
    assert len(steps) == 2, text
    assert steps[0] == steps[1]
    assert int(steps[0].split()[1]) % 7 == 0
