"""The run that goes on is the one with the best seed, bit by bit, under every kind of strategy."""

import csv
import math

import numpy as np
import pytest
import torch

from callbacks.random_restart import RandomRestart, _score, draw
from core.errors import ConfigError
from tests.support.same_run import same_bits
from tests.support.token_runs import callback, ended_alike, fit, state_of, strategy

RESTART = callback("RandomRestart", seeds=4, num_steps=3)
DROPOUT = {"model": {"network": {"init_args": {"dropout": 0.1}},
                     "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 2}}}}  # fmt: skip


def seed(number):
    return {"seed_everything": number}


def restarted(*parts, restart=RESTART):
    """Returns a run that went on with another seed than its own, and its own; which is best depends on the CPU."""
    for first in range(5, 15):
        found = fit(*parts, seed(first), restart)
        if state_of(found, "RandomRestart")["seed"] != first:
            return found, first
    raise AssertionError("none of ten runs went on with another seed than its own")


def losses_of(found):
    with (found.folder / "random_restart.csv").open() as file:
        header, *rows = list(csv.reader(file))
    return header, np.array(rows, dtype=float)


def test_the_run_is_that_of_the_best_seed():
    found, first = restarted(DROPOUT)
    header, table = losses_of(found)
    assert header == ["step", *(f"loss of seed {first + k} (nats/token)" for k in range(4))]
    assert table[:, 0].tolist() == [1, 2, 3]
    best = state_of(found, "RandomRestart")["seed"]
    assert best == first + int(np.argmin(table[-1, 1:]))
    expected = fit(DROPOUT, seed(best))
    ended_alike(found, expected)
    figures = expected.record["figures"].values()
    assert [figure["train/loss"] for figure in figures][:3] == table[:, 1 + best - first].tolist()
    assert (found.folder / "random_restart.png").read_bytes().startswith(b"\x89PNG")
    assert f"seed {best} is the best" in found.error_text


@pytest.mark.ci
def test_a_resumed_run_goes_on_with_the_seed():
    whole, first = restarted(DROPOUT)  # from which dropout would draw otherwise
    usual = DROPOUT, seed(first), RESTART
    fit(*usual, code=-9, kill_at=5, name="random-restart-killed")
    ended_alike(fit(*usual, words=("--ckpt_path=last",), name="random-restart-killed"), whole)


SHUFFLED = {"data": {"init_args": {"shuffle": True, "seed": 6}}}


@pytest.mark.ci
def test_the_data_come_in_another_order_for_each_seed_and_a_resumed_run_has_that_of_the_best():
    shuffling = callback("RandomRestart", seeds=4, num_steps=3, shuffle_data=True)
    found, first = restarted(DROPOUT, SHUFFLED, restart=shuffling)
    usual = DROPOUT, seed(first), SHUFFLED, shuffling
    best = state_of(found, "RandomRestart")["seed"]
    own = {"data": {"init_args": {"shuffle": True, "seed": 6 + best - first}}}
    expected = fit(DROPOUT, seed(best), own)
    ended_alike(found, expected)
    table = losses_of(found)[1]
    figures = [figure["train/loss"] for figure in expected.record["figures"].values()]
    assert figures[:3] == table[:, 1 + best - first].tolist()
    fit(*usual, code=-9, kill_at=5, name="random-restart-shuffled")
    ended_alike(fit(*usual, words=("--ckpt_path=last",), name="random-restart-shuffled"), found)


CONSTANT = {"model": {"network": {"init_args": {"dropout": 0.1}},
                      "lr_scheduler": {"class_path": "WarmupConstant", "init_args": {"warmup_steps": 2}}}}  # fmt: skip


@pytest.mark.ci
def test_the_run_begins_with_the_weights_of_the_best(tmp_path):
    usual = CONSTANT, seed(5), callback("RandomRestart", seeds=4, num_steps=3, keep_weights=True)
    found = fit(*usual)
    best = state_of(found, "RandomRestart")["seed"]
    trained = fit(CONSTANT, seed(best), {"trainer": {"max_steps": 3}})
    torch.save(trained.checkpoint()["state_dict"], tmp_path / "weights.pt")
    load = {
        "class_path": "tests.support.weights.Weights",
        "init_args": {"path": str(tmp_path / "weights.pt")},
    }
    ended_alike(found, fit(CONSTANT, seed(best), {"trainer": {"callbacks": [load]}}))
    fit(*usual, code=-9, kill_at=5, name="random-restart-kept")
    ended_alike(fit(*usual, words=("--ckpt_path=last",), name="random-restart-kept"), found)


def callbacks(*overlays):
    return {
        "trainer": {"callbacks": [one for overlay in overlays for one in overlay["trainer"]["callbacks"]]}
    }


def test_others_begin_with_the_best_seed():
    average, finder = (
        callback("ExponentialMovingAverage"),
        callback("LRFinder", num_steps=12, min_lr=1e-3, then="use"),
    )
    found, first = restarted(restart=callbacks(average, finder, RESTART))  # in any order
    best, rate = state_of(found, "RandomRestart")["seed"], state_of(found, "LRFinder")["rate"]
    expected = fit(seed(best), average, {"model": {"optimizer": {"init_args": {"lr": rate}}}})
    ended_alike(found, expected)
    name = "ExponentialMovingAverage"
    assert best != first
    assert same_bits(state_of(found, name), state_of(expected, name))


ROTARY = {"model": {"network": {"init_args": {"position": "rotary", "tie_embeddings": False, "bias": False}}}}
RANKS = {
    "DDP": (strategy("DDP"), DROPOUT),
    "FSDP": (strategy("FSDP"),),
    "tensor": (strategy("HybridParallel", tensor=2), ROTARY),
    "pipeline": (strategy("HybridParallel", pipeline=2),),
    "ZeRO-2": (strategy("DeepSpeedZero", stage=2),),
    "ZeRO-3": (strategy("DeepSpeedZero", stage=3, persistence_threshold=0),),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "FSDP",
        pytest.param("tensor", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("DDP", "pipeline", "ZeRO-2", "ZeRO-3")),
    ],
)
def test_two_ranks_go_on_with_the_best_seed(name):
    found = fit(*RANKS[name], RESTART, ranks=2)
    best = state_of(found, "RandomRestart")["seed"]
    losses = losses_of(found)[1]
    assert best == int(np.argmin(losses[-1, 1:]))
    assert len({*losses[0, 1:]}) == 4  # each seed has weights of its own
    ended_alike(found, fit(*RANKS[name], seed(best), ranks=2))


@pytest.mark.slow
def test_under_zero_the_run_begins_with_the_best_seed_at_the_rate_that_is_found():
    zero, finder = RANKS["ZeRO-3"][0], callback("LRFinder", num_steps=12, min_lr=1e-3, then="use")
    found = fit(zero, callbacks(finder, RESTART), ranks=2)
    best, rate = state_of(found, "RandomRestart")["seed"], state_of(found, "LRFinder")["rate"]
    assert len({*losses_of(found)[1][0, 1:]}) == 4  # each seed has weights of its own
    ended_alike(found, fit(zero, seed(best), {"model": {"optimizer": {"init_args": {"lr": rate}}}}, ranks=2))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_to_one_rank_ends_the_trial_on_both(rank):
    terminate = {
        "class_path": "tests.support.terminate.Terminate",
        "init_args": {"rank": rank, "forward": 3},
    }
    both = callbacks({"trainer": {"callbacks": [terminate]}}, RESTART)
    done = fit(strategy("DDP"), both, ranks=2, code=143, name=f"restart-sigterm-{rank}")
    assert not (done.folder / "random_restart.csv").exists()
    assert done.codes == (143, 143)


def test_the_least_loss_of_the_last_tenth_wins():
    curves = {3: [4.0] * 18 + [3.0, 1.0], 4: [5.0] * 18 + [1.5, 1.5], 5: [1.0] * 18 + [2.0, float("nan")]}
    assert {seed: _score(losses) for seed, losses in curves.items()} == {3: 2.0, 4: 1.5, 5: math.inf}
    [axes] = draw(curves, 4).axes
    assert [line.get_label() for line in axes.lines][-1] == "seed 4 (best): 1.500"


# Mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"seeds": 1}, {"num_steps": 0}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match="seeds from 2 and num_steps from 1 upwards"):
        RandomRestart(**options)


WILD = {"model": {"optimizer": {"init_args": {"lr": 1e30}}}, "trainer": {"gradient_clip_val": None}}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([callback("RandomRestart", num_steps=7)], "num_steps is 7, and the run has only 6 steps"),
        ([RESTART, {"data": {"class_path": "tests.support.toy.ToyData", "init_args": {}}}], "which ToyData does not record"),
        ([callback("RandomRestart", num_steps=3, shuffle_data=True), {"data": {"init_args": {"shuffle": False}}}],
         "shuffle_data is true, and the data are read in order"),
        ([RESTART, WILD], "from no seed the loss stayed finite"),
    ],
)  # fmt: skip
def test_mistakes_in_a_run(parts, said):
    done = fit(*parts, code=2)
    assert said in done.error_text
    assert len(done.error_text.splitlines()) <= 10
