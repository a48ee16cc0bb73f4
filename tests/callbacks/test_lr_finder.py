"""The range test leaves nothing behind but the rate, finds what closed forms say, and agrees over ranks."""

import csv

import numpy as np
import pytest

from callbacks.lr_finder import LRFinder, draw, measured, suggestions
from core.errors import ConfigError
from tests.support.token_runs import callback, ended_alike, fit, state_of, strategy

FINDER = {"min_lr": 1e-4, "max_lr": 10.0, "num_steps": 16}


def optimizer(name, rate, schedule=None, **options):
    model = {"optimizer": {"class_path": name, "init_args": {"lr": rate, **options}}}
    return {"model": model | ({"lr_scheduler": schedule} if schedule else {})}


def scheduled(name, **init_args):
    return {"class_path": name, "init_args": init_args}


OWN = {"model": {"parameter_options": {"*.q_proj*": {"lr": 0.003}, "*embed*": {"weight_decay": 0.0}}}}
CASES = {
    "AdamW, a schedule in steps, groups of their own": (
        optimizer("AdamW", 0.004, scheduled("WarmupCosine", warmup_steps=2)), OWN),
    "Muon, a schedule in tokens": (
        optimizer("Muon", 0.004, scheduled("WarmupCosine", warmup_tokens=192, total_tokens=576)),),
    "SGD, a schedule of torch's": (
        optimizer("torch.optim.SGD", 0.5, scheduled("torch.optim.lr_scheduler.ExponentialLR", gamma=0.7)),),
    "ScheduleFreeAdamW": (optimizer("ScheduleFreeAdamW", 0.01, warmup_steps=2),),
}  # fmt: skip


def at(rate, parts):
    """Returns what is written where the rate is another."""
    own = {name: {**options, "lr": options["lr"] / 0.004 * rate} if "lr" in options else options
           for name, options in OWN["model"]["parameter_options"].items()}  # fmt: skip
    changed = {"model": {"optimizer": {"init_args": {"lr": rate}}}}
    return (*parts, changed, *([{"model": {"parameter_options": own}}] if OWN in parts else []))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name != next(iter(CASES)))) for name in CASES]
)
def test_the_run_after_it_is_the_run_at_that_rate(name):
    parts = CASES[name]
    found = fit(*parts, callback("LRFinder", **FINDER, then="use"))
    rate = state_of(found, "LRFinder")["rate"]
    assert rate in np.geomspace(1e-4, 10.0, 16)
    ended_alike(found, fit(*at(rate, parts)))


def test_the_run_after_it_is_the_run_without_it():
    parts = CASES["AdamW, a schedule in steps, groups of their own"]
    found = fit(*parts, callback("LRFinder", max_lr=0.1, num_steps=16, sweep="linear"))
    ended_alike(found, fit(*parts))
    assert state_of(found, "LRFinder") == {"rate": None}


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [list(CASES)[1], *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[::2])]
)
def test_a_resumed_run_goes_on_at_the_rate(name):
    usual = (*CASES[name], callback("LRFinder", **FINDER, then="use"))
    whole = fit(*usual)
    label = f"lr-finder-killed-{list(CASES).index(name)}"
    fit(*usual, code=-9, kill_at=5, name=label)
    ended_alike(fit(*usual, words=("--ckpt_path=last",), name=label), whole)


RANKS = {
    "DDP": strategy("DDP"),
    "FSDP": {
        "trainer": {**strategy("FSDP")["trainer"], "num_sanity_val_steps": 1}
    },  # leaves parameters gathered
    "tensor": strategy("HybridParallel", tensor=2),
    "ZeRO-2": strategy("DeepSpeedZero", stage=2, offload_optimizer="cpu"),
    "ZeRO-3": strategy("DeepSpeedZero", stage=3, persistence_threshold=0),
}


# What is measured and undone is RandomRestart's too, whose test takes a tensor-parallel mesh by default.
@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["FSDP", *(pytest.param(name, marks=pytest.mark.slow) for name in RANKS if name != "FSDP")]
)
def test_two_ranks_find_one_rate(name):
    parts = (RANKS[name], *CASES["AdamW, a schedule in steps, groups of their own"])
    found = fit(*parts, callback("LRFinder", **FINDER, then="use"), ranks=2)
    rate = state_of(found, "LRFinder")["rate"]
    ended_alike(found, fit(*at(rate, parts), ranks=2))


def test_what_it_writes():
    parts = CASES["SGD, a schedule of torch's"]
    found = fit(*parts, callback("LRFinder", **FINDER, then="use", pick="minimum/10"))
    with (found.folder / "lr_finder.csv").open() as file:
        header, *rows = list(csv.reader(file))
    assert header == ["step", "learning rate", "loss (nats/token)", "smoothed loss (nats/token)"]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    rates, losses, smooth = np.array([row[1:] for row in rows], dtype=float).T
    assert rates.tolist() == np.geomspace(1e-4, 10.0, 16)[: len(rows)].tolist()
    assert losses[0] == pytest.approx(np.log(64), rel=0.02)  # all of 64 tokens are as likely
    assert state_of(found, "LRFinder")["rate"] == rates[np.argmin(smooth)] / 10
    assert (found.folder / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    assert f"LRFinder: {rates[np.argmin(smooth)] / 10:.3g} by minimum/10" in found.error_text


def test_it_ends_the_run_if_asked():
    parts = CASES["AdamW, a schedule in steps, groups of their own"]
    found = fit(*parts, callback("LRFinder", **FINDER, then="stop"))
    assert found.record["steps"] == 0
    assert (found.folder / "lr_finder.csv").is_file()


def test_it_stops_where_the_loss_blows_up():
    wild = {"min_lr": 1e-3, "max_lr": 1e12, "num_steps": 30}
    parts = (optimizer("torch.optim.SGD", 0.5), {"trainer": {"gradient_clip_val": None}})
    found = fit(*parts, callback("LRFinder", **wild, then="stop"))
    rows = (found.folder / "lr_finder.csv").read_text().splitlines()[1:]
    assert 8 <= len(rows) < 30


# Closed forms -------------------------------------------------------------------------------------------


def test_the_steepest_slope_of_a_logistic_curve_is_at_its_middle():
    rates = np.geomspace(1e-6, 1.0, 201)
    curve = measured(rates, 5 + 2 / (1 + (rates / 1e-3) ** 2))  # falls from 7 to 5, with its middle at 1e-3
    steepest, _ = suggestions(curve)
    assert steepest == pytest.approx(1e-3, rel=0.08)  # the grid: a factor of 1.07


def test_the_minimum_of_a_parabola_is_found_through_noise():
    rates = np.geomspace(1e-5, 1.0, 101)
    noise = np.random.default_rng(0).normal(0, 0.02, 101)
    curve = measured(rates, 5 + 0.1 * (np.log10(rates) + 2) ** 2 + noise)
    _, tenth = suggestions(curve)
    assert np.log10(tenth) == pytest.approx(-3, abs=0.2)
    assert np.std((curve.smooth - curve.losses)[20:80]) > np.std((curve.smooth - curve.losses + noise)[20:80])


def test_a_straight_line_is_its_own_smoothed_curve():
    rates = np.geomspace(1e-4, 1.0, 30)
    curve = measured(rates, 7 - 0.3 * np.log(rates))
    np.testing.assert_allclose(curve.smooth, curve.losses, rtol=1e-12)
    np.testing.assert_allclose(curve.slopes[2:-2], -0.3, rtol=1e-10)
    assert draw(curve, *suggestions(curve), 0.01).axes


# Mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_lr": 0.0}, "0 < min_lr < max_lr"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "0 < min_lr < max_lr"),
        ({"num_steps": 7}, "num_steps from 8"),
        ({"blow_up": 1.0}, "blow_up above 1"),
    ],
)
def test_mistakes(options, said):
    with pytest.raises(ConfigError, match=said):
        LRFinder(**options)


def test_a_loss_that_never_falls_gives_no_rate():
    rates = np.geomspace(1e-4, 1.0, 20)
    assert suggestions(measured(rates, 5 + rates)) == (None, None)
    with pytest.raises(ConfigError, match="blew up after 3 steps"):
        measured(rates[:3], np.ones(3))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([callback("LRFinder", num_steps=200)], "num_steps is 200, and an epoch of the data has 83 steps"),
        ([callback("LRFinder"), {"data": {"class_path": "tests.support.toy.ToyData", "init_args": {}}}], "which ToyData does not record"),
        ([callback("LRFinder"), strategy("DDP", compression="powersgd")], "the error that PowerSGD keeps"),
    ],
)  # fmt: skip
def test_mistakes_in_a_run(parts, said):
    done = fit(*parts, code=2)
    assert said in done.error_text
    assert len(done.error_text.splitlines()) <= 10
