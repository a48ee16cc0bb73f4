"""Two real gloo ranks give the loss curve, gradient norms and weights of one process."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from core import checkpoint

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
