"""Rules about optimizer and schedule: rate, warm-up, decay, clipping, epsilon, spikes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.data import PRETRAINING
from toolkit.diagnosis.foreign import BRIEF
from toolkit.diagnosis.parts import (
    guard_remedy,
    network_remedy,
    schedule_remedy,
    suspects,
    taken_out,
    without_callbacks,
)

UPDATE = "doctor/update_ratio"
"""Update over weight in a step: of the median matrix of the blocks."""

WILD, LEAST_MOVE = 0.3, 0.8
"""An update ratio that no weights stand; the sum of them over a run below which weights have hardly moved."""


def _usual_rate(case: Case) -> float:
    """Returns the learning rate at which the first updates would be 3 / sqrt(steps) of the initial weights.

    A rule of thumb, to within a factor of 3: it gives 9e-3 for 48 steps and 4e-4 for 20,000 steps on weights of N(0, 0.02).
    NaN where the weights are not fresh, or it is not known.
    """
    ratio, rate = case.series(UPDATE), case.series("train/lr")
    if not len(ratio) or not len(rate) or ratio.steps[0] != rate.steps[0] or ratio.values[0] <= 0:
        return math.nan
    if case.has_weights or not math.isfinite(case.max_steps):
        return math.nan
    return 3 / math.sqrt(case.max_steps) * float(rate.values[0] / ratio.values[0])


def _rate_overlay(rate: float) -> dict[str, Any]:
    return {"model": {"optimizer": {"init_args": {"lr": float(f"{rate:.2g}")}}}}


def _peak(case: Case) -> float:
    """Returns the highest rate: the one that is configured, until steps after the warm-up show another."""
    rates = case.series("train/lr")
    given = case.number("model.optimizer.lr", float(rates.values.max()) if len(rates) else math.nan)
    if len(rates) < 8 or rates.steps[-1] <= _warmup(case) + 2:
        return given
    usual = float(np.quantile(rates.values[-20:], 0.7))
    return usual if usual > 1.5 * given else min(given, 1.5 * float(rates.values.max()))


def _risen(case: Case) -> int | None:
    """Returns the step in which the rate became three times as high and more, and stayed so; None: there is none."""
    rate, loss = case.series("train/lr"), case.series("train/loss")
    for index in np.flatnonzero(rate.values[1:] > 3 * rate.values[:-1]) + 1:
        step, after = int(rate.steps[index]), rate.values[index : index + 6]
        risen = (
            len(after) >= 5
            and rate.values[index - 1] > 0
            and bool((after > 3 * rate.values[index - 1]).all())
        )
        before, later = loss.up_to(step - 1).values[-5:], loss.since(step).values[:SPAN]
        if risen and step > _warmup(case) + 1 and len(before) and later.max() > 1.05 * np.median(before):
            return step
    return None


def _warmup(case: Case) -> float:
    given = case.number("model.lr_scheduler.warmup_steps", 0)
    return given if given >= 1 else given * case.max_steps if math.isfinite(case.max_steps) else 0.0


def rate_too_high(case: Case) -> Iterator[Finding]:
    """Updates are as large as the weights."""
    ratio, usual, peak = case.series(UPDATE), _usual_rate(case), _peak(case)
    if at := _risen(case):
        before, after = (
            float(values[k])
            for values, k in (
                (case.series("train/lr").up_to(at - 1).values, -1),
                (case.series("train/lr").since(at).values, 0),
            )
        )
        yield Finding(
            "rate_too_high", at, f"the rate goes from {before:.3g} to {after:.3g}, and the loss rises", 0.806,
            "Let the schedule and the config alone set the rate", without_callbacks(case) or _rate_overlay(before),
        )  # fmt: skip
        return
    unwarmed = _warmup(case) < min(0.03 * case.max_steps, 5)
    rates, given = case.series("train/lr"), case.number("model.optimizer.lr", math.inf)
    if len(rates) and (over := rates.values > 3 * given).any():
        first, falls = rates.first_step(over), int(np.argmax(rates.values)) == 0
        brief = over.sum() <= BRIEF and not over[0] and not over[-1]
        yield Finding(
            "spike_by_optimizer" if brief else "no_warmup" if falls else "rate_too_high", first, f"the rate is {rates.values.max():.3g}, and {given:g} is set", 0.805,
            "Take a schedule whose highest rate is that of the optimizer", without_callbacks(case) or schedule_remedy(case) or {"model": _schedule(case, 0.12)},
        )  # fmt: skip
    # Adam's first updates move every weight by the rate: without a warm-up, half as much does harm
    wild = ~(ratio.values < np.where((ratio.steps <= 2) & unwarmed, WILD / 2, WILD))
    if not wild.any() or case.last("doctor/frozen") > 0:  # adapters begin at zero
        return
    first = ratio.first_step(wild)
    evidence = f"a step changes weights by {ratio.values[wild][0]:.0%} of their size"
    if first <= 2 and unwarmed and not peak > 12 * usual:
        lower = _rate_overlay(usual)["model"] if peak > 2 * usual else {}
        yield Finding(
            "no_warmup", first, f"{evidence}, with {_warmup(case):.0f} steps of warm-up", 0.795,
            "Warm the rate up over the first 10% of the steps" + (f", to about {usual:.1g}" if peak > 2 * usual else ""),
            {"model": _schedule(case, 0.12) | lower},
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
        or not FEW_STEPS <= case.max_steps < math.inf
    ):
        return
    at = int(ratio.steps[-1])
    now = float(rate.up_to(at).values[-1])
    move = float(ratio.values[-1]) * peak / max(now, 1e-30) * case.max_steps
    if move < LEAST_MOVE and peak < usual / 8 and len(ratio) >= 2:
        yield Finding(
            "rate_too_low", int(ratio.steps[0]), f"at the full rate of {peak:g} all steps of the run together would move "
            f"weights by {move:.1%} of their size", 0.66,
            f"Raise the rate to about {usual:.1g}, or let LRFinder choose it", schedule_remedy(case) or _rate_overlay(usual),
        )  # fmt: skip


FEW_STEPS = 24
"""A run of fewer, such as a trial of a configuration, moves weights little at any rate."""


def group_moves_otherwise(case: Case) -> Iterator[Finding]:
    """One kind of weights, or one block of new ones, is updated far less or more than the others (figures of `WeightMonitor`)."""
    groups = case.groups("update_ratio")
    kinds = [name for name in ("embedding", "head", "attention", "mlp") if name in groups]
    blocks = [] if case.has_weights else [name for name in groups if name.startswith("block.")]
    for names in (kinds, blocks):
        usual = {
            name: float(np.median(groups[name].values[:3]))
            for name in names
            if len(groups[name]) >= 3 and (groups[name].values[:3] > 0).all()
        }
        for name, own in usual.items():
            others = [one for other, one in usual.items() if other != name]
            times = own / float(np.median(others)) if others else 1.0
            if times < 1 / 30 and (size := _size_beside(case, name, names)) > 1 / 10:
                yield Finding(
                    "bad_initialisation", 1, f"a step moves weights of {name} {size:.2g} times as far as others, which is {own:.2g} of their "
                    f"size, and {np.median(others):.2g} of that of others: they are too large", 0.86, "Initialise as GPT-2, N(0, 0.02)",
                    without_callbacks(case) or network_remedy(case),
                )  # fmt: skip
                return
            if times < 1 / 30 or (times > 15 and own > WILD):
                yield Finding(
                    "rate_too_low" if times < 1 else "rate_too_high", int(groups[name].steps[0]), f"a step changes weights of {name} by {own:.2g} of their size, others by "
                    f"{np.median(others):.2g}", 0.75, f"Give {name} the rate of the others",
                    _own_options(case, "lr", _peak(case)) or without_callbacks(case),
                )  # fmt: skip
                return


def _size_beside(case: Case, name: str, names: Sequence[str]) -> float:
    """Returns how long the first updates of a group are beside those of others; NaN where it is not known."""
    sizes = dict[str, float]()
    for one in names:
        _, ratio, norm = case.together(f"update_ratio/{one}", f"weight_norm/{one}")
        if len(norm):
            sizes[one] = float(ratio[0] * norm[0])
    others = [size for one, size in sizes.items() if one != name]
    return sizes[name] / float(np.median(others)) if name in sizes and others else math.nan


def _own_options(case: Case, option: str, value: float) -> dict[str, Any]:
    """Returns the overlay that gives single parameters what all have, where they have an option of their own."""
    own = case.option("model.parameter_options", {}) or {}
    chosen = {
        name: {option: value} for name, given in own.items() if isinstance(given, dict) and option in given
    }
    return {"model": {"parameter_options": chosen}} if chosen else {}


def _schedule(case: Case, warmup: float) -> dict[str, Any]:
    """Returns the overlay of a warm-up, of the schedule that there is, or of a cosine."""
    own = schedule_remedy(case, warmup).get("model")
    name = {} if case.option("model.lr_scheduler") else {"class_path": "WarmupCosine"}
    return own or {"lr_scheduler": {**name, "init_args": {"warmup_steps": warmup}}}


def schedule_ends_early(case: Case) -> Iterator[Finding]:
    """The rate is nearly zero long before the run ends, or the schedule is set to end then."""
    rate, steps = case.series("train/lr"), case.max_steps
    if not len(rate) or not math.isfinite(steps):
        return
    highest = float(rate.values.max())
    peak = min(case.number("model.optimizer.lr", highest), highest)
    low = (rate.values < 0.02 * peak) & np.maximum.accumulate(rate.values >= 0.5 * peak)
    planned = case.number("model.lr_scheduler.total_steps", math.inf)
    planned = planned * steps if planned <= 1 else planned
    since, evidence = steps, ""
    if planned < 0.8 * steps:
        since, evidence = 1, f"the schedule ends at step {planned:.0f} of {steps:.0f}"
    elif low.any():
        since = rate.first_step(low)
        evidence = f"train/lr is below 2% of its peak from step {since} of {steps:.0f} on"
    if since < 0.8 * steps:
        yield Finding(
            "schedule_ends_early", int(since), evidence, 0.9,
            "Let the schedule end with the run",
            {"model": {"lr_scheduler": {"init_args": {"total_steps": None}}}} if math.isfinite(planned) else without_callbacks(case) or schedule_remedy(case),
        )  # fmt: skip


def warmup_too_long(case: Case) -> Iterator[Finding]:
    """The rate rises, or is set to rise, over 40% of the run and more, or has not come to half of what is set by then."""
    warmup, rate, steps = _warmup(case), case.series("train/lr"), case.max_steps
    if not math.isfinite(steps) or len(rate) <= 4:
        return
    given, highest = case.number("model.optimizer.lr", 0.0), float(rate.values.max())
    late = rate.steps[-1] > 0.4 * steps
    still = late and bool((np.diff(rate.values) > 0).all())
    early = rate.up_to(rate.steps[-1] / 4).values  # none, of a run that was resumed with other settings
    grows = len(early) > 0 and rate.values[-1] > 1.05 * float(np.median(early))
    stuck = late and grows and given / 50 < highest < 0.5 * given
    begins = case.series("train/lr").steps[rate.values >= 0.5 * (given or highest)]
    stuck = stuck or bool(len(begins) and begins[0] > 0.4 * steps and rate.values[0] < 0.25 * given)
    if still or stuck or (warmup > 0.4 * steps and rate.values[-1] > rate.values[0]):
        evidence = (
            f"the rate rises for {max(warmup, rate.steps[-1] if still else 0):.0f} of {steps:.0f} steps"
        )
        yield Finding(
            "warmup_too_long", int(rate.steps[4]), f"the rate is {highest:.2g} at most until step {rate.steps[-1]}, and {given:g} is set"
            if stuck else evidence, 0.8, "Warm up over the first 10% of the steps",
            {**without_callbacks(case), "model": _schedule(case, 0.1)},
        )  # fmt: skip


def epsilon_too_large(case: Case) -> Iterator[Finding]:
    """Adam's epsilon is far above the gradients, which takes the adaptive step away."""
    own = case.option("model.parameter_options", {}) or {}
    given = {"all weights": case.number("model.optimizer.eps", 0.0)}
    given |= {name: float(one.get("eps") or 0.0) for name, one in own.items() if isinstance(one, dict)}
    where, eps = max(given.items(), key=lambda pair: pair[1])
    ratios = case.series(UPDATE).values
    if eps >= 1e-3 and len(ratios) >= 2:
        remedy = {"model": {"optimizer": {"init_args": {"eps": 1e-8}}}}
        yield Finding(
            "epsilon_too_large", 1, f"eps of {where} is {eps:g}, above usual gradients, and updates are {np.median(ratios):.2g} of the "
            "weights", 0.83, "Set eps to 1e-8", _own_options(case, "eps", 1e-8) if where in own else remedy,
        )  # fmt: skip


def weight_decay_too_large(case: Case) -> Iterator[Finding]:
    """Decay shrinks weights by percents in each step, as it is set, or as updates show it."""
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
    steps, along, shares = case.together("doctor/update_shrinks", UPDATE)
    shrinks = np.flatnonzero((along > 0.7) & (shares > 0.02))
    if peak * decay > 0.02 and decay > 0.5:
        remedy: dict[str, Any] = {"model": {"optimizer": {"init_args": {"weight_decay": 0.1}}}}
        if where in options:
            remedy = {"model": {"parameter_options": {where: {"weight_decay": 0.1}}}}
        yield Finding(
            "weight_decay_too_large", 1, f"each step takes {peak * decay:.1%} off {where} (lr {peak:g}, weight_decay {decay:g})",
            0.81, "Set weight_decay to 0.1", remedy,
        )  # fmt: skip
    elif outside := _outside(case, over_validation=False):
        yield Finding(
            "weight_decay_too_large", outside[0], f"between two steps something takes {outside[1]:.1%} off the weights", 0.85,
            f"Leave out {suspects(case)}" if suspects(case) else "Decay weights in the optimizer alone", without_callbacks(case),
        )  # fmt: skip
    elif len(shrinks) >= 2:
        yield Finding(
            "weight_decay_too_large", int(steps[shrinks[0]]), f"a step takes {shares[shrinks[0]]:.1%} off the weights and changes little else", 0.805,
            "Set weight_decay to 0.1", without_callbacks(case) or {"model": {"optimizer": {"init_args": {"weight_decay": 0.1}}}},
        )  # fmt: skip


def _outside(case: Case, over_validation: bool) -> tuple[int, float] | None:
    """Returns since when weights shrink between steps, and by how much: each time, or only over validations; None: never."""
    shrunk, validated = case.series("doctor/shrunk_outside"), case.series("val/loss").steps
    changed = np.abs(shrunk.values) > 0.005
    between = np.isin(shrunk.steps - 1, validated)
    chosen = changed & (between if over_validation else shrunk.values > 0.005)
    alone = not (changed & ~between).any()
    if not chosen.any() or alone != over_validation:
        return None
    return shrunk.first_step(chosen), float(shrunk.values[chosen][0])


def average_left_in(case: Case) -> Iterator[Finding]:
    """Weights are others after a validation than before it, as if an average had been left in."""
    if found := _outside(case, over_validation=True):
        yield Finding(
            "average_wrong", found[0], f"a validation leaves weights that are {abs(found[1]):.1%} larger or smaller", 0.9,
            f"Leave out {suspects(case)}" if suspects(case) else "Put the weights back after a validation", without_callbacks(case),
        )  # fmt: skip


def clip_too_low(case: Case) -> Iterator[Finding]:
    """Every step is clipped to a tiny part of its gradient."""
    clip, norm = case.number("trainer.gradient_clip_val", math.inf), case.series("train/grad_norm")
    median = float(np.median(norm.values)) if len(norm) else math.nan
    if 0 < clip <= 0.02 and len(norm) >= 2 and median > 0 and (share := clip / median) < 0.05:
        yield Finding(
            "clip_too_low", int(norm.steps[0]), f"every step is clipped to {share:.1g} of its gradient", 0.86,
            "Clip at 1.0", {"trainer": {"gradient_clip_val": 1.0}},
        )  # fmt: skip


def optimizer_state_lost(case: Case) -> Iterator[Finding]:
    """The optimizer counts fewer steps than the run, or has forgotten gradients faster than it is set to."""
    behind, lost = case.series("doctor/optimizer_steps_behind"), case.worst("doctor/state_lost", 0.05)
    lost = lost or case.worst("doctor/moments_lost", 0.05)
    bad = behind.values > 0
    if bad.any() or lost:
        evidence = (
            f"the optimizer's state is {behind.values[bad][-1]:.0f} steps younger than the run"
            if bad.any()
            else (f"the optimizer has forgotten what it knew of {lost[1]:.0%} of the tensors" if lost else "")
        )
        since = behind.first_step(bad) if bad.any() else lost[0] if lost else 1
        if bad.any() and (still := int((case.series("doctor/step_size").values == 0).sum())) >= 2:
            yield Finding(
                "weights_not_updated", since, f"{evidence}: in {still} logged steps no weight changes", 0.93, "Let the optimizer make each step",
                taken_out(case),
            )  # fmt: skip
            return
        # once, it is over, and going back before the jump that it led to is what helps
        losses = case.series(
            "doctor/moments_lost" if len(case.series("doctor/moments_lost")) else "doctor/state_lost"
        )
        once = not bad.any() and int((losses.values > 0.05).sum()) == 1
        yield Finding(
            "optimizer_state_lost", since, evidence, 0.77 if once else 0.93, "Keep the optimizer's state, and load it on a resume",
            without_callbacks(case),
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
    jumps = np.flatnonzero(
        (rise > np.maximum(8 * spread, 0.35 * middle)) & (loss.values[SPAN:] > before.max(1))
    )
    if not len(jumps):
        return
    index = int(jumps[0])
    step = int(loss.steps[SPAN + index])
    # weights that a step has spoilt show in the fixed batch after that step, and in the loss of the next one
    near, earlier = anchor.since(step - 1).up_to(step + 1), anchor.up_to(step - 2)
    if not len(near) or not len(earlier):
        return
    share = float(near.values.max() - earlier.values[-SPAN:].min()) / float(rise[index])
    evidence = (
        f"train/loss jumps from {middle[index]:.3g} to {loss.values[SPAN + index]:.3g}; that of a fixed batch moves by "
        f"{share:.0%} of it"
    )
    by_data = share < 0.4
    yield Finding(
        "spike_by_data" if by_data else "spike_by_optimizer", step, evidence, 0.78,
        "Drop such steps, or go back before them" if by_data else "Go back before them",
        guard_remedy(case, step, goes_back=not by_data),
    )  # fmt: skip


SPAN = 10
"""Steps before a jump of the loss that it is compared with."""


def batch_far_from_noise(case: Case) -> Iterator[Finding]:
    """The batch is far smaller or larger than the gradient noise scale, or has next to no tokens."""
    ratio, seen = case.series("noise_scale/batch_ratio"), case.series("train/tokens")
    tokens = float(seen.values[-1] / max(seen.steps[-1], 1)) if len(seen) else 0.0
    now = float(np.median(ratio.values[-3:])) if len(ratio) >= 3 else 1.0
    few = case.is_causal and 0 < tokens < FEW_TOKENS and case.class_of("data") in PRETRAINING
    if now > 30 or 0 < now < 1 / 30 or few:
        batches, small = int(case.number("trainer.accumulate_grad_batches", 1)), few or now > 1
        times = max(2, round(min(now, 1000) / 10), round(256 / tokens) if few else 0)
        what = f"the gradient noise scale is {now:.3g} times the batch"
        yield Finding(
            "batch_too_small" if small else "batch_too_large", 1 if few else int(ratio.steps[-3]),
            f"a step has {tokens:.0f} tokens" if few else what, 0.785 if few else 0.7,  # jumps follow from that
            "Take more micro-batches a step" if small else "Take fewer tokens a step, and more steps",
            {"trainer": {"accumulate_grad_batches": batches * times if small else max(1, batches // 4)}},
        )  # fmt: skip


FEW_TOKENS = 100
"""Tokens of a step whose gradient is mostly noise from the first steps on."""


def memory_of_optimizer(case: Case) -> Iterator[Finding]:
    """The optimizer is set to forget gradients at once, or to go by those of a thousand steps before."""
    betas = case.option("model.optimizer.betas")
    first, second = betas[:2] if isinstance(betas, list | tuple) and len(betas) >= 2 else (0.9, 0.95)
    longest = max(float(first), case.number("model.optimizer.momentum", 0.9))
    if second < 0.5 or longest >= 0.998:
        usual = {"betas": [0.9, 0.95]} if second < 0.5 or first >= 0.998 else {"momentum": 0.95}
        yield Finding(
            "optimizer_state_lost" if second < 0.5 else "stale_gradients", 1,
            f"squared gradients are kept with a factor of {second:g} from step to step, gradients of {longest:g}", 0.785,
            "Take usual values, such as 0.9 and 0.95", {"model": {"optimizer": {"init_args": usual}}},
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    rate_too_high, rate_too_low, group_moves_otherwise, schedule_ends_early, warmup_too_long, epsilon_too_large, weight_decay_too_large,
    average_left_in,
    clip_too_low, optimizer_state_lost, spikes, batch_far_from_noise, memory_of_optimizer,
)  # fmt: skip
