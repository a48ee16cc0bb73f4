"""The weights, the optimizer's state and the figures of one process, to the last bit, on any number of ranks."""

from functools import cache

import numpy as np
import pytest

from conformance.workshop import workshop
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.same_run import SAVED, fit, same_bits

UNITS, ROWS, LENGTH, STEPS = 8, 2, 16, 5
TOKENS = (
    2 * UNITS * ROWS * LENGTH + 20
)  # an epoch is two steps; one process alone would begin a third with a longer rest
FIGURES = ("train/loss", "train/grad_norm", "train/tokens", "val/loss")
ADAMW = {"class_path": "AdamW", "init_args": {"lr": 1e-2, "fused": False}}


def overlay(ranks, strategy="DDP", exact=True, **arguments):
    """Returns a run with dropout, clipping that bites, several epochs and, with more than one rank, a strategy."""
    folder = workshop() / "tokens of ranks"
    if not folder.exists():
        tokens = np.random.default_rng(0).integers(64, size=TOKENS)
        for split in ("train", "validation"):
            TokenShards(1000).write([tokens], folder / split, vocab_size=64)
    callback = {"class_path": "RankInvariance", "init_args": {"micro_batches": UNITS}}
    data = {
        "folder": str(folder),
        "sequence_length": LENGTH,
        "batch_size": ROWS,
        "shuffle": True,
        "vocab_size": 64,
    }
    return {
        "trainer": {
            "max_steps": STEPS,
            "accumulate_grad_batches": 1 if exact else UNITS // ranks,
            "limit_val_batches": 1.0,
            "strategy": {"class_path": strategy, "init_args": arguments} if ranks > 1 else "auto",
            "callbacks": [callback] if exact else [],
        },
        "model": {"optimizer": ADAMW, "network": {"init_args": {"dropout": 0.1}}},
        "data": {"class_path": "tests.support.tokens.StoredTokens", "init_args": data},
    }  # fmt: skip


@cache
def trained(ranks, strategy="DDP", exact=True, stage=None):
    name = f"invariant-{ranks}-{strategy}-{exact}-{stage}"
    arguments = {} if stage is None else {"stage": stage}
    return fit(overlay(ranks, strategy, exact, **arguments), ranks, name=name).succeeded(name)


def differ(found, expected):
    """Returns what of two runs is not the same to the last bit."""
    one, other = found.checkpoint(), expected.checkpoint()
    wrong = [part for part in ("state_dict", "optimizer_states") if not same_bits(one[part], other[part])]
    for step, figures in expected.record["figures"].items():
        if step in found.record["figures"]:
            mine = found.record["figures"][step]
            wrong += [f"{step}: {name}" for name in FIGURES if mine.get(name) != figures.get(name)]
    return wrong


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "auto"),
        (3, "DDP"),  # two have three micro-batches, one has two
        pytest.param(2, "DDP", marks=pytest.mark.ci),
        pytest.param(2, "FSDP", marks=pytest.mark.ci),
        pytest.param(3, "FSDP", marks=pytest.mark.ci),
        pytest.param(4, "DDP", marks=pytest.mark.slow),
        pytest.param(4, "FSDP", marks=pytest.mark.slow),
        pytest.param(8, "DDP", marks=pytest.mark.slow),
        pytest.param(8, "FSDP", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_has_every_bit_of_one_process_that_accumulates(ranks, strategy):
    assert differ(trained(ranks, strategy), trained(1, exact=False)) == []


@pytest.mark.ci
def test_without_it_ranks_have_other_bits():
    assert "state_dict" in differ(trained(2, exact=False), trained(1, exact=False))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param((2, "DDP"), (3, "FSDP"), marks=pytest.mark.ci),
        pytest.param((4, "FSDP"), (3, "DDP"), marks=pytest.mark.slow),
        pytest.param((3, "FSDP"), (1, "auto"), marks=pytest.mark.slow),
    ],
)
def test_other_ranks_go_on_with_the_same_bits(before, now):
    saved = trained(*before).folder / "checkpoints" / f"step-{SAVED}.ckpt"
    name = f"invariant from {before} to {now}"
    found = fit(overlay(*now), now[0], f"--ckpt_path={saved}", name=name).succeeded(name)
    assert "From checkpoint" in found.stdout + found.stderr
    assert differ(found, trained(1, exact=False)) == []
