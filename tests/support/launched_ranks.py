"""Two ranks as users start them, and forked ones."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from conformance.runs import run
from plugins.checkpoints import checkpoint, finding

HOUSE = Path(__file__).resolve().parents[2]


CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 6,
        "log_every_n_steps": 1,
        "val_check_interval": 3,
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
    "data": {"class_path": "tests.support.uneven.UnevenData"},
}


def write(folder):
    """Writes the configuration; returns the arguments of a run in this folder."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return [f"--config={config}", f"--trainer.default_root_dir={folder / 'run'}"]


def forked(ranks, folder, *more, **how):
    """Trains in forked processes, which find what a launcher sets in their environment."""
    strategy = ["--trainer.strategy=ddp"] if ranks > 1 else []
    words = ["fit", *write(folder), f"--trainer.devices={ranks}", *strategy, *more]
    return run(words, folder, ranks=ranks, **how)


def results(folder):
    """Returns the figures by step and the last checkpoint."""
    with open(folder / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
        figures = {int(row["step"]): row for row in csv.DictReader(file)}
    return figures, checkpoint.read_checkpoint(finding.newest(folder / "run"))


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
