"""The weights, the optimizer's state and the figures of one process, to the last bit, on any number of ranks."""

import copy
import json
from functools import cache

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from callbacks.rank_invariance import RankInvariance
from conformance.workshop import workshop
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from plugins.cli.configuration.config_files import merge
from tests.support.same_run import SAVED, fit, same_bits
from tests.support.tiny_training import VOCAB, Record, module, trainer
from tests.support.tokens import StoredTokens

UNITS, ROWS, LENGTH, STEPS = 8, 2, 16, 5
TOKENS = (
    2 * UNITS * ROWS * LENGTH + 20
)  # an epoch is two steps; one process alone would begin a third with a longer rest
FIGURES = ("train/loss", "train/grad_norm", "train/tokens", "val/loss")
ADAMW = {"class_path": "AdamW", "init_args": {"lr": 1e-2, "fused": False}}


STRATEGIES = {
    "auto": "auto",
    "DDP": {"class_path": "DDP"},
    "FSDP": {"class_path": "FSDP"},
    "FSDP, stage 2": {"class_path": "FSDP", "init_args": {"stage": 2}},
}


def overlay(ranks, strategy, exact=True):
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
            "strategy": STRATEGIES[strategy],
            "callbacks": [callback] if exact else [],
        },
        "model": {"optimizer": ADAMW, "network": {"init_args": {"dropout": 0.1}}},
        "data": {"class_path": "tests.support.tokens.StoredTokens", "init_args": data},
    }  # fmt: skip


@cache
def trained(ranks, strategy, exact=True):
    name = f"invariant-{ranks}-{strategy}-{exact}"
    return fit(overlay(ranks, strategy, exact), ranks, name=name).succeeded(name)


def accumulated():
    """Returns the run of one process without the technique."""
    return trained(1, "auto", exact=False)


def differ(found, expected, after=0):
    """Returns what of two runs is not the same to the last bit, and which figures after a step."""
    one, other = found.checkpoint(), expected.checkpoint()
    wrong = [part for part in ("state_dict", "optimizer_states") if not same_bits(one[part], other[part])]
    for step, figures in expected.record["figures"].items():
        if int(step) > after:
            mine = found.record["figures"][step]
            wrong += [f"{step}: {name}" for name in FIGURES if mine.get(name) != figures.get(name)]
    return wrong


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        pytest.param(1, "auto", marks=pytest.mark.ci),
        (3, "DDP"),  # two have three micro-batches, one has two
        *(pytest.param(2, strategy, marks=pytest.mark.ci) for strategy in ("DDP", "FSDP", "FSDP, stage 2")),
        pytest.param(3, "FSDP", marks=pytest.mark.ci),
        pytest.param(3, "FSDP, stage 2", marks=pytest.mark.slow),
        *(pytest.param(r, s, marks=pytest.mark.slow) for r in (4, 8) for s in ("DDP", "FSDP")),
    ],
)
def test_any_number_of_ranks_has_every_bit_of_one_process_that_accumulates(ranks, strategy):
    found = trained(ranks, strategy)
    assert differ(found, accumulated()) == []
    assert ("1.06 to 1.34 times" in found.stdout + found.stderr) is (ranks > 1)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Muon", marks=pytest.mark.slow)])
def test_optimizers_that_are_fused_by_default_have_the_same_bits(kind):
    one, sharded = (
        fit(
            merge(overlay(ranks, strategy), {"trainer": {"max_steps": 3}})
            | {"model": {"optimizer": {"class_path": kind, "init_args": {"lr": 1e-2}}}},
            ranks,
            name=f"invariant-{kind}-{ranks}",
        ).succeeded(kind)
        for ranks, strategy in ((1, "auto"), (2, "FSDP"))
    )
    assert differ(sharded, one) == []


@pytest.mark.ci
def test_a_compiled_loss_is_compiled_once_for_all_seeds():
    chosen = overlay(1, "auto")
    whole = {"class_path": "Compile", "init_args": {"scope": "whole", "backend": "eager"}}
    chosen["trainer"]["callbacks"].append(whole)
    found = fit(chosen, 1, name="invariant-compiled").succeeded("compiled")
    assert differ(found, accumulated()) == []
    assert len(json.loads((found.folder / "compile.json").read_text())["graphs"]) == 1


@pytest.mark.ci
def test_without_it_ranks_have_other_bits():
    assert "state_dict" in differ(trained(2, "DDP", exact=False), accumulated())


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
    assert differ(found, accumulated(), after=SAVED) == []


@pytest.mark.parametrize(
    ("strategy", "arguments", "said"),
    [
        ("DDP", {"compression": "bf16"}, "--trainer.strategy.compression=none"),
        ("FSDP", {"param_format": "bf16"}, "--trainer.strategy.reduce_format=fp32"),
        ("FSDP", {}, "--trainer.strategy.param_format=fp32"),
        ("HybridParallel", {}, "take DDP or FSDP"),
    ],
)
def test_what_would_have_other_bits_is_refused_before_the_run(strategy, arguments, said):
    chosen = overlay(1, "auto")
    chosen["trainer"] |= {
        "strategy": {"class_path": strategy, "init_args": arguments},
        "precision": "bf16-mixed",
    }
    done = fit(chosen, 1, "--trainer.devices=9", "--callbacks.RankInvariance.micro_batches=8")
    assert done.code == 2
    assert said in done.error_text
    assert "micro_batches is 8 on 9 ranks" in done.error_text
    assert len(done.error_text.splitlines()) <= 10


@pytest.mark.parametrize(
    ("kind", "said"),
    [("Adafactor", "adds squares shard by shard"), ("AdamW8bit", "quantises blocks of a shard")],
)
def test_an_optimizer_whose_steps_depend_on_the_shards_is_refused(kind, said):
    chosen = overlay(2, "FSDP")
    chosen["model"] = {"optimizer": {"class_path": kind}}
    done = fit(chosen, 1, "--trainer.devices=2")
    assert done.code == 2
    assert f"{kind} {said}" in done.error_text


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError, match="micro_batches is 0"):
        RankInvariance(0)


class Breaking(Callback):
    """Ends a run in the middle of a step."""

    def on_after_backward(self, trainer, pl_module):
        raise ArithmeticError


def test_a_run_after_one_that_broke_off_in_a_step_has_the_same_bits(tmp_path):
    data = {**overlay(1, "auto")["data"]["init_args"], "vocab_size": VOCAB}
    for split in ("train", "validation"):
        TokenShards(1000).write([np.arange(TOKENS) % VOCAB], tmp_path / split, vocab_size=VOCAB)
    data = StoredTokens(**data | {"folder": str(tmp_path)})

    def fit(trained, data, *callbacks):
        torch.manual_seed(0)
        seen = Record()
        runner = trainer(tmp_path, callbacks=[*callbacks, seen], max_steps=2, limit_val_batches=0)
        runner.fit(trained, data)
        return seen.gradients

    torch.manual_seed(0)
    one = module()
    other, callback = copy.deepcopy(one), RankInvariance(micro_batches=4)
    threads = torch.get_num_threads()
    with pytest.raises(ArithmeticError):
        fit(one, data, callback, Breaking())
    assert "packed" not in vars(data)
    assert "compute_loss" not in vars(one)
    assert (one.in_parts, torch.get_num_threads()) == (False, threads)
    found, expected = fit(one, data, callback), fit(other, data, RankInvariance(micro_batches=4))
    assert len(found) == len(expected) == 2
    assert same_bits(found, expected)
