"""The schedules with a warm-up against their closed forms: in steps and tokens, as counts and fractions."""

import math
import os
from functools import partial

import numpy as np
import pytest
import torch

from conformance import Case
from conformance.training import fit as fit_case
from core.errors import ConfigError
from core.language_module import LanguageModule
from plugins.cli.selection import describe
from plugins.networks.gpt import GPT
from plugins.objectives.causal_lm import CausalLM
from plugins.schedules.warmup_constant import WarmupConstant
from plugins.schedules.warmup_cosine import WarmupCosine
from plugins.schedules.warmup_inverse_square_root import WarmupInverseSquareRoot
from plugins.schedules.warmup_linear import WarmupLinear
from plugins.schedules.warmup_square_root import WarmupSquareRoot
from plugins.schedules.warmup_stable_decay import WarmupStableDecay
from tests.support.tiny_training import Record, fit, trainer, uneven_batches
from tests.support.toy import ToyData
from toolkit.selection import Run

W, T, R = 10, 100, 0.25
PEAKS = (3e-4, 2e-2)


def falling(height):
    """Warm-up, then from 1 to R along a height between 1 and 0; s counts the steps from 1, in float64."""

    def factors(s, w=W, t=T):
        share = np.clip((s - w) / (t - w), 0, 1)
        return np.where(s < w, s / w, R + (1 - R) * height(share))

    return factors


def stable(height):
    def factors(s, w=W, t=T):
        share = np.clip((s - (t - 30 * t / T)) / (30 * t / T), 0, 1)
        return np.where(s < w, s / w, R + (1 - R) * height(share))

    return factors


SHAPES = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + np.cos(np.pi * p)) / 2,
    "square_root": lambda p: 1 - np.sqrt(p),
    "square_root_remaining": lambda p: np.sqrt(1 - p),
}
SCHEDULES = {
    "constant": (WarmupConstant, {}, lambda s, w=W, t=T: np.minimum(s / w, 1)),
    "linear": (WarmupLinear, {"min_lr_ratio": R}, falling(SHAPES["linear"])),
    "cosine": (WarmupCosine, {"min_lr_ratio": R}, falling(SHAPES["cosine"])),
    "square root": (WarmupSquareRoot, {"min_lr_ratio": R}, falling(SHAPES["square_root"])),
    "square root remaining": (WarmupSquareRoot, {"min_lr_ratio": R, "decay": "square_root_remaining"},
                              falling(SHAPES["square_root_remaining"])),
    "inverse square root": (WarmupInverseSquareRoot, {"min_lr_ratio": R},
                            lambda s, w=W, t=T: np.where(s < w, s / w, np.maximum(np.sqrt(w / s), R))),
    **{f"stable, {name}": (WarmupStableDecay, {"min_lr_ratio": R, "decay_steps": 0.3, "decay": name}, stable(shape))
       for name, shape in SHAPES.items()},
}  # fmt: skip
ALL = pytest.mark.parametrize(("kind", "options", "closed_form"), SCHEDULES.values(), ids=SCHEDULES)
ENDS = {name: parts for name, parts in SCHEDULES.items() if parts[0].ends}


def build(kind, steps=T, **options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in PEAKS]
    optimizer = torch.optim.SGD(groups)
    schedule = kind(optimizer, **options)
    schedule.bind(steps)
    return optimizer, schedule


def run(optimizer, schedule, step_tokens):
    """Returns the factors on both peaks with which steps of so many tokens are made."""
    taken = []
    for tokens in step_tokens:
        schedule.begin_step(tokens)
        taken.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return np.array(taken).reshape(-1, 2) / PEAKS


@ALL
def test_every_step_has_the_rate_of_the_closed_form(kind, options, closed_form):
    found = run(*build(kind, warmup_steps=W, **options), [1] * T)
    expected = closed_form(np.arange(1.0, T + 1))
    np.testing.assert_allclose(found, np.stack([expected] * 2, axis=1), rtol=1e-12)


@ALL
def test_the_corners_are_exact(kind, options, closed_form):
    _, schedule = build(kind, warmup_steps=W, **options)

    def factor(step):
        schedule.last_epoch = step
        return schedule.factor()

    assert factor(0) == 1 / W
    assert factor(W - 1) == 1.0
    assert factor(T - 1) == (R if kind.ends else pytest.approx(closed_form(float(T)), rel=1e-15))
    if kind.ends:
        assert factor(T) == factor(T + 1000) == R
    assert factor((W + T) // 2) == pytest.approx(closed_form((W + T) // 2 + 1.0), rel=1e-14)


@ALL
def test_a_count_and_a_fraction_are_the_same(kind, options, closed_form):
    count, fraction = (run(*build(kind, warmup_steps=w, **options), [1] * T) for w in (W, W / T))
    assert (count == fraction).all()


@pytest.mark.parametrize(("kind", "options", "closed_form"), ENDS.values(), ids=ENDS)
def test_a_schedule_may_end_before_the_run(kind, options, closed_form):
    for total in (50, 0.5):
        found = run(*build(kind, warmup_steps=W, total_steps=total, **options), [1] * T)[:, 0]
        np.testing.assert_allclose(found[:50], closed_form(np.arange(1.0, 51), t=50), rtol=1e-12)
        assert (found[49:] == R).all()


def in_tokens(kind, options, tokens):
    """Arguments in tokens for a schedule whose lengths are W and T steps of so many tokens."""
    total = {"total_tokens": T * tokens} if kind.ends else {}
    return {**options, "warmup_tokens": W * tokens, **total}


@ALL
def test_tokens_in_equal_steps_are_steps(kind, options, closed_form):
    steps = run(*build(kind, warmup_steps=W, **options), [512] * T)
    tokens = run(*build(kind, **in_tokens(kind, options, 512)), [512] * T)
    np.testing.assert_allclose(tokens, steps, rtol=1e-14)
    assert (tokens[[0, W - 1, T - 1]] == steps[[0, W - 1, T - 1]]).all()


@ALL
def test_steps_of_growing_size_are_placed_by_their_tokens(kind, options, closed_form):
    sizes = np.repeat([100, 200, 400, 500], [20, 20, 10, 8])  # 14,000 tokens in all
    total = {"total_tokens": 14_000} if kind.ends else {}
    found = run(*build(kind, warmup_tokens=1400, **total, **options), sizes)[:, 0]
    np.testing.assert_allclose(found, closed_form(np.cumsum(sizes) / 1.0, w=1400, t=14_000), rtol=1e-12)


@ALL
@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_a_resumed_schedule_goes_on_bitwise(kind, options, closed_form, unit):
    options = {**options, "warmup_steps": W} if unit == "steps" else in_tokens(kind, options, 512)
    whole, first, last = run(*build(kind, **options), [512] * T), build(kind, **options), 0
    for stop in (0, W - 1, 55):
        run(*first, [512] * (stop - last))
        second, last = build(kind, **options), stop
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(first[1].state_dict())
        second[1].bind(T)
        assert (run(*second, [512] * (T - stop)) == whole[stop:]).all()


def test_a_resumed_run_takes_length_and_peak_from_the_user():
    optimizer, schedule = build(WarmupCosine, 40, warmup_steps=5, min_lr_ratio=0.1)
    run(optimizer, schedule, [1] * 20)
    state = schedule.state_dict()
    assert set(state) == {"last_epoch", "_step_count", "tokens"}  # a position, no settings
    optimizer, schedule = build(WarmupCosine, 80, warmup_steps=5, min_lr_ratio=R)
    schedule.load_state_dict(state)
    schedule.bind(80)
    rates = [group["lr"] for group in optimizer.param_groups]
    expected = falling(SHAPES["cosine"])(21.0, 5, 80)
    assert schedule.get_last_lr() == rates == pytest.approx([peak * expected for peak in PEAKS], rel=1e-14)


def test_phases_may_be_a_step_long():
    for warmup, total in ((1, 50), (99, 100), (10, 11)):
        found = run(*build(WarmupCosine, total, warmup_steps=warmup, min_lr_ratio=R), [1] * total)[:, 0]
        expected = falling(SHAPES["cosine"])(np.arange(1.0, total + 1), warmup, total)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert run(*build(WarmupCosine, 1, warmup_steps=0), [1])[0, 0] == 1.0
    assert (
        run(*build(WarmupCosine, 1, warmup_steps=100), [1])[0, 0] == 1 / 100
    )  # there is no room for another


def test_without_warm_up_the_first_step_has_the_peak():
    for options in ({"warmup_steps": 0}, {"warmup_tokens": 0, "total_tokens": 51_200}):
        found = run(*build(WarmupLinear, **options), [512] * T)[:, 0]
        assert found[0] == 1.0
        assert found[-1] == 0.0
        np.testing.assert_allclose(np.diff(found), -1 / 99, rtol=1e-9)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_counts_the_positions_of_its_micro_batches(tmp_path, accumulation):
    """2 rows of 12 tokens a micro-batch, most of them without a label."""
    step = 24 * accumulation
    record = Record()
    trained = LanguageModule(
        lambda: GPT(vocab_size=61, n_layer=1, n_head=2, n_embd=16, max_sequence_length=12), CausalLM(),
        lambda groups: torch.optim.SGD(groups, lr=0.5),
        partial(WarmupLinear, warmup_tokens=2 * step, total_tokens=5 * step),
    )  # fmt: skip
    fit(tmp_path, trained, uneven_batches(18), [record], max_steps=6, accumulate_grad_batches=accumulation)
    rates = [figures["train/lr"] for figures in record.figures]
    assert rates == pytest.approx([0.25, 0.5, 0.5 * 2 / 3, 0.5 / 3, 0.0, 0.0], rel=1e-14, abs=1e-16)
    assert rates[4:] == [0.0, 0.0]


def test_a_run_that_resumes_in_tokens_is_the_one_that_did_not_stop(tmp_path):
    def train(steps, ckpt_path=None):
        record = Record()
        trained = LanguageModule(
            lambda: GPT(vocab_size=64, n_layer=1, n_head=2, n_embd=16, max_sequence_length=16), CausalLM(),
            lambda groups: torch.optim.SGD(groups, lr=0.5),
            partial(WarmupCosine, warmup_tokens=200, total_tokens=640),
        )  # fmt: skip
        torch.manual_seed(0)
        runner = trainer(tmp_path, max_steps=steps, callbacks=[record])
        runner.fit(trained, datamodule=ToyData(), ckpt_path=ckpt_path)
        runner.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return [figures["train/lr"] for figures in record.figures], trained.state_dict()

    whole, weights = train(10)
    train(4)
    rates, resumed = train(10, tmp_path / "4.ckpt")
    assert rates == whole[4:]
    assert rates[-1] == 0.05
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


REFUSED = [
    (WarmupLinear, {"warmup_steps": -1}, "WarmupLinear: warmup_steps is -1"),
    (WarmupLinear, {"warmup_steps": math.nan}, "warmup_steps is nan"),
    (WarmupLinear, {"warmup_steps": 1.5}, "a number of steps is an integer"),
    (WarmupLinear, {"min_lr_ratio": 1.1}, "min_lr_ratio from 0 to 1"),
    (WarmupLinear, {"min_lr_ratio": math.nan}, "min_lr_ratio from 0 to 1"),
    (WarmupLinear, {"total_steps": 0}, "total_steps is 0"),
    (WarmupLinear, {"warmup_tokens": 10}, "no total_tokens"),
    (WarmupLinear, {"total_tokens": 1000}, "warmup_steps is 100, but the schedule counts tokens"),
    (WarmupStableDecay, {"warmup_tokens": 1, "total_tokens": 9, "decay_steps": 5}, "Give decay_tokens too"),
    (WarmupStableDecay, {"decay": "cosin"}, "Did you mean cosine?"),
    (WarmupSquareRoot, {"decay": "square_rot"}, "Did you mean square_root?"),
    (WarmupConstant, {"warmup_tokens": 0.1}, "a fraction of a schedule without an end"),
    (WarmupInverseSquareRoot, {"min_lr_ratio": -0.1}, "WarmupInverseSquareRoot takes min_lr_ratio"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_values_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), **options)


TOO_LONG = [
    (WarmupConstant, {"warmup_steps": 100}, "warmup_steps is 100, and the schedule has only 100 steps"),
    (WarmupLinear, {"warmup_steps": 5, "total_steps": 101}, "total_steps is 101, and the run has only 100"),
    (WarmupStableDecay, {"warmup_steps": 50, "decay_steps": 51}, "to 100 together or less"),
    (
        WarmupLinear,
        {"warmup_tokens": 5, "total_tokens": 6401},
        "total_tokens is 6,401, and the run has only 6,400 tokens",
    ),
    (WarmupLinear, {"warmup_tokens": 700, "total_tokens": 600}, "warmup_tokens is 700"),
    (WarmupConstant, {"warmup_tokens": 6401}, "warmup_tokens is 6,401, and the run has only 6,400 tokens"),
    (WarmupInverseSquareRoot, {"warmup_tokens": 6400}, "to less than 6400, or train for longer"),
]


@pytest.mark.parametrize(("kind", "options", "message"), TOO_LONG)
def test_what_is_too_long_is_refused_before_the_run(kind, options, message):
    """With 4 rows of 8 tokens, accumulated twice: 64 tokens a step."""
    config = {
        "trainer": {"max_steps": 100, "accumulate_grad_batches": 2},
        "data": {"batch_size": 4, "sequence_length": 8},
    }
    defaults = {
        "warmup_steps": 100,
        "total_steps": None,
        "decay_steps": 0.2 if kind is WarmupStableDecay else None,
    }
    own = describe("model.lr_scheduler", kind, f"x.{kind.__name__}", defaults | options)
    faults = list(kind.preflight(Run((own,), config), own))
    assert len(faults) == 1
    assert message in faults[0]
    config["trainer"]["max_steps"] = 1000
    too_long_itself = options.get("warmup_tokens", 0) >= options.get("total_tokens", math.inf)
    assert bool(list(kind.preflight(Run((own,), config), own))) == too_long_itself


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"warmup_steps": 30}, "WarmupCosine: warmup_steps is 30, and the schedule has only 30 steps"),
        ({"warmup_steps": 5, "total_steps": 5}, "less than 5, or train for longer"),
        ({"warmup_steps": 5, "total_steps": 31}, "total_steps is 31, and the run has only 30 steps"),
    ],
)
def test_what_is_too_long_is_refused_as_the_run_begins(lengths, message):
    with pytest.raises(ConfigError, match=message):
        build(WarmupCosine, 30, **lengths)


class Ragged(ToyData):
    """Rows of another length on each rank."""

    def __init__(self):
        super().__init__(sequence_length=16 - 4 * int(os.environ.get("RANK", 0)))


def test_ranks_that_count_different_tokens_are_stopped():
    """Both would go on with rates of their own."""
    data = {"class_path": "tests.plugins.schedules.test_warmup.Ragged", "init_args": {}}
    lengths = {"warmup_tokens": 192, "total_tokens": 1024}
    done = fit_case(Case("WarmupCosine", lengths, config={"data": data}), "ragged", ranks=2)
    assert done.code == 2, done.error_text
    assert "the ranks' batches have different shapes" in done.error_text
    assert "--data.packing=BestFit" in done.error_text
