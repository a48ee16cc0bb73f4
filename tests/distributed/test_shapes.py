"""A step takes the same tokens in the same shape, however its batch is dealt out to ranks and micro-batches."""

import re

import numpy as np
import pytest

from conformance.workshop import workshop
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.same_run import TOLERANCE, fit

STEPS, ROWS, LENGTH = 8, 8, 16


def trained(schedule, ranks, accumulated, micro_batch, strategy="DDP"):
    folder = workshop() / "counted tokens"
    if not folder.exists():
        tokens = np.random.default_rng(0).integers(64, size=4001)
        for split in ("train", "validation"):
            TokenShards(1000).write([tokens], folder / split, vocab_size=64)
    data = {"folder": str(folder), "sequence_length": LENGTH, "batch_size": micro_batch, "shuffle": False}
    trainer = {
        "max_steps": STEPS,
        "accumulate_grad_batches": accumulated,
        "val_check_interval": None,
        "limit_val_batches": 0,
        "strategy": strategy if ranks > 1 else "auto",
        "callbacks": [{"class_path": "SequenceLengthSchedule", "init_args": schedule}],
    }
    name = "-".join(re.findall(r"\w+", f"{schedule} {ranks} {accumulated} {strategy}"))
    overlay = {
        "trainer": trainer,
        "data": {"class_path": "tests.support.tokens.StoredTokens", "init_args": data | {"vocab_size": 64}},
    }
    done = fit(overlay, ranks, name=name)
    assert done.code == 0, done.error_text
    figures = done.record["figures"].values()
    return [one["train/tokens"] for one in figures], [one["train/loss"] for one in figures]


LINEAR = {"start": 3, "multiple": 3, "duration": 7, "intermittent_short": 0.5}


@pytest.mark.ci
@pytest.mark.parametrize(
    "schedule",
    [
        LINEAR,
        pytest.param({**LINEAR, "keep": "batch"}, marks=pytest.mark.ci),
        pytest.param({"start": 4, "growth": "doubling", "duration": 6}, marks=pytest.mark.ci),
    ],
    ids=["linear", "as many rows", "doubling"],
)
def test_every_layout_of_a_batch_has_the_same_curve(schedule):
    tokens, losses = trained(schedule, 1, 1, ROWS)
    assert len(set(np.diff(tokens, prepend=0))) > 1 or schedule.get("growth") == "doubling"
    layouts = ((2, 1), (4, 1), (2, 2), (1, 4), (1, 8)) if schedule == LINEAR else ((2, 2), (1, 8))
    for ranks, accumulated in layouts:
        found = trained(schedule, ranks, accumulated, ROWS // ranks // accumulated)
        assert found[0] == tokens, (ranks, accumulated)
        assert found[1] == pytest.approx(losses, rel=TOLERANCE), (ranks, accumulated)
    if (
        schedule.get("growth") == "doubling"
    ):  # other schedules make batches that do not divide into micro-batches
        stages = {"class_path": "HybridParallel", "init_args": {"pipeline": 2}}
        found = trained(schedule, 2, 2, ROWS // 2, stages)
        assert found[0] == tokens
        assert found[1] == pytest.approx(losses, rel=TOLERANCE)
