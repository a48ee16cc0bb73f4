"""kill -9 at random moments, 8 times in all: the resumed run is bitwise the run that was never killed."""

import csv
import random
from pathlib import Path

import pytest
import torch
import yaml

from conformance.runs import Run, run
from plugins.checkpoints import checkpoint, finding
from tests.support.documents import write_documents
from tests.support.killing import Moment, killer

HOUSE = Path(__file__).resolve().parent.parent
STEPS = 120
KILLS = 4

CONFIG = {
    "base": str(HOUSE / "configs" / "defaults.yaml"),
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "log_every_n_steps": 1,
        "val_check_interval": 20,
        "check_val_every_n_epoch": None,
        "accumulate_grad_batches": 2,
        "callbacks": [
            {"class_path": "ProgressBar"},
            {"class_path": "Throughput"},
            {"class_path": "LossCurve"},
            {"class_path": "PeriodicCheckpoint", "init_args": {"every_n_steps": 4}},
            {"class_path": "RunSummary"},
        ],
    },
    "model": {
        "network": {
            "class_path": "GPT",
            "init_args": {
                "vocab_size": 320, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "dropout": 0.1,
            },
        },
        "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 20}},
    },
    "data": {
        "class_path": "PretrainDataModule",
        "init_args": {
            "tokenizer": {"class_path": "BPETokenizer", "init_args": {"vocab_size": 320}},
            "sequence_length": 16,
            "batch_size": 2,
        },
    },
}  # fmt: skip


def fit(folder: Path, config: Path, workers: int, resume: bool) -> Run:
    words = [
        "fit",
        f"--config={config}",
        f"--data.num_workers={workers}",
        f"--trainer.default_root_dir={folder}",
    ]
    words += [f"--data.source={folder.parent / 'documents'}", f"--data.cache_dir={folder.parent / 'cache'}"]
    progress = f"{{class_path: tests.support.killing.Progress, init_args: {{folder: {folder}}}}}"
    return run(
        [*words, f"--trainer.callbacks+={progress}", *(["--ckpt_path=last"] if resume else [])], folder
    )


def rows(folder: Path) -> dict[int, dict[str, str]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


def killed_run(folder: Path, config: Path, workers: int) -> None:
    """Kills the run in whatever it does, a random time after a random batch, KILLS times; then lets it end."""
    chance = random.Random(workers)
    folder.mkdir()
    for kill in range(KILLS):
        batches = chance.randint(1, 30) if kill else 20  # the first comes behind a checkpoint
        with killer(folder, Moment(0, batches, chance.uniform(0.0, 0.08))) as killed:
            done = fit(folder, config, workers, resume=kill > 0)
        assert killed, f"the run was over before it could be killed: {done.error_text}"
        assert done.codes == (-9,)
    finish(folder, config, workers, resume=True)


def finish(folder: Path, config: Path, workers: int, resume: bool) -> None:
    folder.mkdir(exist_ok=True)
    done = fit(folder, config, workers, resume)
    assert done.code == 0, done.error_text


@pytest.mark.ci  # the kit kills each technique's run once by default
@pytest.mark.timeout(900)
def test_kills_change_no_bit(tmp_path):
    write_documents(tmp_path / "documents")
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    whole = tmp_path / "whole"
    finish(whole, config, workers=0, resume=False)

    killed = {workers: tmp_path / f"killed{workers}" for workers in (0, 2)}
    for workers, folder in killed.items():
        killed_run(folder, config, workers)

    expected_rows = rows(whole)
    expected = checkpoint.read_checkpoint(finding.newest(whole))
    assert expected["global_step"] == STEPS
    assert expected["epoch"] >= 1, "the run crosses the end of an epoch"
    for folder in killed.values():
        found_rows = rows(folder)
        exact = ("train/loss", "train/tokens", "train/lr", "train/grad_norm", "val/loss")
        for name in exact:
            columns = [column for column in next(iter(expected_rows.values())) if column.startswith(name)]
            assert columns, f"no column for {name}"
            for column in columns:
                assert {s: r[column] for s, r in found_rows.items()} == {
                    s: r[column] for s, r in expected_rows.items()
                }, f"{folder.name}: {column}"
        found = checkpoint.read_checkpoint(finding.newest(folder))
        assert_same_bits(found["state_dict"], expected["state_dict"])
        assert_same_bits(found["optimizer_states"], expected["optimizer_states"])
        assert found["lr_schedulers"] == expected["lr_schedulers"]


def assert_same_bits(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_bits(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    else:
        assert found == expected
