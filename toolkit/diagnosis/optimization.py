"""Rules about optimizer and schedule: rate, warm-up, decay, clipping, epsilon, spikes, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import guard_remedy, without_callbacks

UPDATE = "doctor/update_ratio"
"""Update over weight in a step: of the median matrix of the blocks."""

WILD, LEAST_MOVE = 0.3, 0.35
"""An update ratio that no weights stand; the sum of them over a run below which weights have hardly moved."""


def _usual_rate(case: Case) -> float:
    """Returns the learning rate at which the first updates would be 3 / sqrt(steps) of the initial weights.

    A rule of thumb, to within a factor of 3: it gives 9e-3 for 48 steps and 4e-4 for 20,000 steps on weights of N(0, 0.02).
    NaN where the weights are not fresh, or it is not known.
    """
    ratio, rate = case.series(UPDATE), case.series("train/lr")
    if not len(ratio) or not len(rate) or ratio.steps[0] != rate.steps[0] or ratio.values[0] <= 0:
        return math.nan
    if case.option("model.weights") or case.option("ckpt_path") or not math.isfinite(case.max_steps):
        return math.nan
    return 3 / math.sqrt(case.max_steps) * float(rate.values[0] / ratio.values[0])


def _rate_overlay(rate: float) -> dict[str, Any]:
    return {"model": {"optimizer": {"init_args": {"lr": float(f"{rate:.2g}")}}}}


def _peak(case: Case) -> float:
    rates = case.series("train/lr").values
    return case.number("model.optimizer.lr", float(rates.max()) if len(rates) else math.nan)


def _warmup(case: Case) -> float:
    given = case.number("model.lr_scheduler.warmup_steps", 0)
    return given if given >= 1 else given * case.max_steps if math.isfinite(case.max_steps) else 0.0


def rate_too_high(case: Case) -> Iterator[Finding]:
    """Updates are as large as the weights."""
    ratio, usual, peak = case.series(UPDATE), _usual_rate(case), _peak(case)
    wild = ~(ratio.values < WILD)
    if not wild.any() or case.last("doctor/frozen") > 0:  # adapters begin at zero
        return
    first = ratio.first_step(wild)
    evidence = f"a step changes weights by {ratio.values[wild][0]:.0%} of their size"
    if first <= 2 and _warmup(case) < min(0.03 * case.max_steps, 5) and not peak > 8 * usual:
        lower = _rate_overlay(usual)["model"] if peak > 2 * usual else {}
        yield Finding(
            "no_warmup", first, f"{evidence}, with {_warmup(case):.0f} steps of warm-up", 0.795,
            "Warm the rate up over the first 10% of the steps" + (f", to about {usual:.1g}" if peak > 2 * usual else ""),
            {"model": {"lr_scheduler": {"init_args": {"warmup_steps": 0.12}}} | lower},
        )  # fmt: skip
    elif peak > 3 * usual or math.isnan(usual):
        rate = usual if math.isfinite(usual) else peak / 10
        yield Finding(
            "rate_too_high", first, f"{evidence}, on the way to a rate of {peak:g}", 0.8,
            f"Lower the rate to about {rate:.1g}, or let LRFinder choose it", _rate_overlay(rate),
        )  # fmt: skip


def rate_too_low(case: Case) -> Iterator[Finding]:
    """Updates are so small that the weights would hardly change in the whole run."""
    ratio, rate, usual, peak = case.series(UPDATE), case.series("train/lr"), _usual_rate(case), _peak(case)
    if (
        not len(ratio)
        or not math.isfinite(usual)
        or not rate.values.max() > 0
        or not math.isfinite(case.max_steps)
    ):
        return
    at = int(ratio.steps[-1])
    now = float(rate.up_to(at).values[-1])
    move = float(ratio.values[-1]) * peak / max(now, 1e-30) * case.max_steps
    if move < LEAST_MOVE and peak < usual / 8 and len(ratio) >= 2:
        yield Finding(
            "rate_too_low", int(ratio.steps[0]), f"at the full rate of {peak:g} all steps of the run together would move "
            f"weights by {move:.1%} of their size", 0.66,
            f"Raise the rate to about {usual:.1g}, or let LRFinder choose it", _rate_overlay(usual),
        )  # fmt: skip


def schedule_ends_early(case: Case) -> Iterator[Finding]:
    """The rate is nearly zero long before the run ends."""
    rate = case.series("train/lr")
    if not len(rate) or not math.isfinite(case.max_steps):
        return
    peak = (
        min(_peak(case), float(rate.values.max())) if math.isfinite(_peak(case)) else float(rate.values.max())
    )
    low = (rate.values < 0.02 * peak) & np.maximum.accumulate(rate.values >= 0.5 * peak)
    if low.any() and rate.first_step(low) < 0.8 * case.max_steps:
        at = rate.first_step(low)
        yield Finding(
            "schedule_ends_early", at, f"train/lr is below 2% of its peak from step {at} of {case.max_steps:.0f} on", 0.9,
            "Let the schedule end with the run", {"model": {"lr_scheduler": {"init_args": {"total_steps": None}}}},
        )  # fmt: skip


def warmup_too_long(case: Case) -> Iterator[Finding]:
    """The rate still rises when a third of the run is over."""
    warmup, rate = _warmup(case), case.series("train/lr")
    if (
        math.isfinite(case.max_steps)
        and warmup > 0.4 * case.max_steps
        and len(rate) > 4
        and rate.values[-1] > rate.values[0]
    ):
        yield Finding(
            "warmup_too_long", int(rate.steps[4]), f"the warm-up takes {warmup:.0f} of {case.max_steps:.0f} steps", 0.8,
            "Warm up over the first 10% of the steps", {"model": {"lr_scheduler": {"init_args": {"warmup_steps": 0.1}}}},
        )  # fmt: skip


def epsilon_too_large(case: Case) -> Iterator[Finding]:
    """Adam's epsilon is far above the gradients, which takes the adaptive step away."""
    eps = case.number("model.optimizer.eps", 0.0)
    ratios = case.series(UPDATE).values
    if eps >= 1e-3 and len(ratios) >= 2:
        yield Finding(
            "epsilon_too_large", 1, f"the optimizer's eps is {eps:g}, above usual gradients, and updates are "
            f"{np.median(ratios):.2g} of the weights", 0.83, "Set eps to 1e-8", {"model": {"optimizer": {"init_args": {"eps": 1e-8}}}},
        )  # fmt: skip


def weight_decay_too_large(case: Case) -> Iterator[Finding]:
    """Decay shrinks weights by percents in each step."""
    rate = case.series("train/lr").values
    peak = float(rate.max()) if len(rate) else math.nan
    options = case.option("model.parameter_options", {}) or {}
    decays = {"all weights": case.number("model.optimizer.weight_decay", 0.1)}
    decays |= {
        name: float(own.get("weight_decay", 0.0) or 0.0)
        for name, own in options.items()
        if isinstance(own, dict)
    }
    where, decay = max(decays.items(), key=lambda pair: pair[1])
    if peak * decay > 0.02 and decay > 0.5:
        remedy: dict[str, Any] = {"model": {"optimizer": {"init_args": {"weight_decay": 0.1}}}}
        if where in options:
            remedy = {"model": {"parameter_options": {where: {"weight_decay": 0.1}}}}
        yield Finding(
            "weight_decay_too_large", 1, f"each step takes {peak * decay:.1%} off {where} (lr {peak:g}, weight_decay {decay:g})",
            0.81, "Set weight_decay to 0.1", remedy,
        )  # fmt: skip


def clip_too_low(case: Case) -> Iterator[Finding]:
    """Every step is clipped to a tiny part of its gradient."""
    clip, norm = case.number("trainer.gradient_clip_val", math.inf), case.series("train/grad_norm")
    if 0 < clip < 0.01 and len(norm) >= 5 and (share := clip / float(np.median(norm.values))) < 0.005:
        yield Finding(
            "clip_too_low", int(norm.steps[0]), f"every step is clipped to {share:.1g} of its gradient", 0.86,
            "Clip at 1.0", {"trainer": {"gradient_clip_val": 1.0}},
        )  # fmt: skip


def optimizer_state_lost(case: Case) -> Iterator[Finding]:
    """The optimizer counts fewer steps than the run."""
    behind = case.series("doctor/optimizer_steps_behind")
    bad = behind.values > 0
    if bad.any():
        yield Finding(
            "optimizer_state_lost", behind.first_step(bad), f"the optimizer's state is {behind.values[bad][-1]:.0f} steps younger "
            "than the run", 0.93, "Keep the optimizer's state, and load it on a resume", without_callbacks(case),
        )  # fmt: skip


def spikes(case: Case) -> Iterator[Finding]:
    """The loss jumps: with it that of other text, or not."""
    loss, anchor = case.series("train/loss"), case.series("doctor/anchor_loss")
    if len(loss) <= SPAN or len(anchor) < 2 or not np.isfinite(loss.values).all():
        return
    before = np.lib.stride_tricks.sliding_window_view(loss.values[:-1], SPAN)
    middle = np.median(before, axis=1)
    spread = np.median(np.abs(before - middle[:, None]), axis=1)
    rise = loss.values[SPAN:] - middle
    jumps = np.flatnonzero(rise > np.maximum(8 * spread, 0.35 * middle))
    if not len(jumps):
        return
    index = int(jumps[0])
    step = int(loss.steps[SPAN + index])
    at, earlier = anchor.since(step), anchor.up_to(step - 1)
    if not len(at) or not len(earlier):
        return
    share = float(at.values[0] - earlier.values[-SPAN:].min()) / float(rise[index])
    evidence = (
        f"train/loss jumps from {middle[index]:.3g} to {loss.values[SPAN + index]:.3g}; that of a fixed batch moves by "
        f"{share:.0%} of it"
    )
    if share < 0.4:
        yield Finding(
            "spike_by_data", step, evidence, 0.78, "Drop such steps, or go back before them",
            guard_remedy(case, step),
        )  # fmt: skip
    else:
        yield Finding(
            "spike_by_optimizer", step, evidence, 0.78, "Go back before them",
            guard_remedy(case, step, goes_back=True),
        )  # fmt: skip


SPAN = 10
"""Steps before a jump of the loss that it is compared with."""


def batch_far_from_noise(case: Case) -> Iterator[Finding]:
    """The batch is far smaller or larger than the gradient noise scale."""
    ratio = case.series("noise_scale/batch_ratio")
    if len(ratio) < 3:
        return
    now = float(np.median(ratio.values[-3:]))
    if now > 30 or 0 < now < 1 / 30:
        batches = int(case.number("trainer.accumulate_grad_batches", 1))
        many = {"trainer": {"accumulate_grad_batches": batches * max(2, round(min(now, 1000) / 10))}}
        yield Finding(
            "batch_too_small" if now > 1 else "batch_too_large", int(ratio.steps[-3]),
            f"the gradient noise scale is {now:.3g} times the batch", 0.7,
            "Take more micro-batches a step" if now > 1 else "Take fewer tokens a step, and more steps",
            many if now > 1 else {"trainer": {"accumulate_grad_batches": max(1, batches // 4)}},
        )  # fmt: skip


def dropout_too_high(case: Case) -> Iterator[Finding]:
    """Half of the features and more are dropped, or the same batch has a far lower loss without dropout."""
    names = ("dropout", "attention_dropout", "residual_dropout", "embedding_dropout")
    found = {name: case.number(f"model.network.{name}", 0.0) for name in names}
    most = max(found.values())
    plain, loss = case.series("doctor/plain_loss"), case.series("train/loss")
    common = np.intersect1d(plain.steps, loss.steps)
    if most < 0.3 or len(common) < 2:
        return
    without = plain.values[np.isin(plain.steps, common)]
    gaps = loss.values[np.isin(loss.steps, common)] / without - 1
    if most >= 0.5 or np.median(gaps[-3:]) > 0.05:
        yield Finding(
            "dropout_too_high", int(common[0]), f"dropout is {most:g}, and the loss of a batch {np.median(gaps[-3:]):.1%} lower "
            "without it", 0.8, "Leave dropout out",
            {"model": {"network": {"init_args": {name: 0.0 for name, value in found.items() if value > 0}}}},
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    rate_too_high, rate_too_low, schedule_ends_early, warmup_too_long, epsilon_too_large, weight_decay_too_large,
    clip_too_low, optimizer_state_lost, spikes, dropout_too_high, batch_far_from_noise,
)  # fmt: skip
