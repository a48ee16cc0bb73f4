"""Rules about what differs from leyden's own parts: the place of the difference, and its symptom, name the cause.

The figures are those of `comparisons`, of runs that have parts which are not leyden's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.foreign import APART, BRIEF, KINDS, beyond, found
from toolkit.diagnosis.parts import is_known


def initial_weights(case: Case) -> Iterator[Finding]:
    """Weights do not begin as the configuration says."""
    size, center, form, alike = (
        case.last(f"doctor/initial_{one}") for one in ("size", "center", "form", "alike")
    )
    if size > 1.5 or center > 0.5 or form > 0.2 or alike > 0:
        yield found(
            case, "bad_initialisation", 1, f"before the first step a parameter is {size:.3g} times as large or small as it is configured, "
            f"with a mean of {center:.2g} deviations; {alike:.0f} are copies of others", 0.866,
        )  # fmt: skip


def network(case: Case) -> Iterator[Finding]:
    """A network computes something else than leyden's with the same weights: what that leads to names the cause."""
    bad = beyond(case, "doctor/forward_apart", APART)
    # what an early difference leads to may show later
    named = (finding for step in (bad[0].steps if bad else ()) for finding in _of_network(case, int(step)))
    yield from islice(named, 1)


def _of_network(case: Case, step: int) -> Iterator[Finding]:
    """Says what a difference leads to that there is in a step."""

    def at(name: str) -> float:
        return case.at(f"doctor/{name}", step)

    scores = symptoms(at)
    if case.worst("doctor/forward_apart", APART) and at("forward_apart_evaluating") <= APART:
        scores["dropout_too_high"] = (3.0, "only in training")
    kind = KINDS[int(at("part_kind"))] if at("part_kind") >= 0 else "network"
    foreign = not is_known(str((case.option("model.network") or {}).get("class_path", "")))
    if kind == "router" and not foreign:
        scores.setdefault("dead_experts", (2.0, "routers choose other experts"))
    if not foreign and not any(score >= 1 for score, _ in scores.values()):
        scores.setdefault(*DEFAULTS[kind])
    if not scores:
        return
    if kind == "norm" and (of_norms := scores.keys() & {"exploding_gradients", "vanishing_gradients"}):
        scores = {
            cause: scores[cause] for cause in of_norms
        }  # what follows in attention and logits comes from there
    cause = max(scores, key=lambda name: scores[name][0])
    score, what = scores[cause]
    if score >= 1:
        yield found(
            case, cause, step, f"logits differ by {at('forward_apart'):.2g} from those of leyden's network with the same weights, "
            f"first in the part {kind}: {what}", 0.8 if foreign else 0.956,
        )  # fmt: skip


DEFAULTS = {
    "embedding": ("bad_initialisation", (1.0, "embeddings are others")),
    "attention": ("position_ids", (1.0, "attention weighs tokens otherwise, as with other positions")),
    "mlp": ("dead_units", (1.0, "hidden units are others")),
    "norm": ("exploding_gradients", (1.0, "hidden states are scaled otherwise")),
    "router": ("dead_experts", (1.0, "routers choose other experts")),
    "head": ("logit_growth", (1.0, "logits are others")),
    "block": ("vanishing_gradients", (1.0, "what blocks are given or hand on is another")),
    "network": ("logit_growth", (1.0, "logits are others")),
    "matrix": ("low_precision_weights", (1.0, "a matrix multiplies by other weights than it has")),
}
"""Kind of the part that differs -> the cause where no symptom shows."""


def symptoms(at: object) -> dict[str, tuple[float, str]]:
    """Returns cause -> how far a figure is from that of leyden's network, 1 at its limit, and what it is."""
    value = at  # a function of the name of a figure
    scores: dict[str, tuple[float, str]] = {}

    def times(cause: str, name: str, limit: float, below: bool, what: str) -> None:
        own, usual = (value(f"{prefix}_{name}") for prefix in ("own", "usual"))  # type: ignore[operator]
        ratio = max(usual, 1e-30) / max(own, 1e-30) if below else max(own, 1e-30) / max(usual, 1e-30)
        score = math.log(ratio) / math.log(limit) if ratio > 0 else 0.0
        if score >= 1 and score > scores.get(cause, (0.0, ""))[0]:
            scores[cause] = score, f"{what} {own:.2g}, and {usual:.2g} there"

    def more(cause: str, name: str, limit: float, what: str) -> None:
        own, usual = (value(f"{prefix}_{name}") for prefix in ("own", "usual"))  # type: ignore[operator]
        if (own - usual) / limit >= 1:
            scores[cause] = (own - usual) / limit, f"{what} {own:.0%}, and {usual:.0%} there"

    times("attention_collapse", "reach", 1.25, True, "attention depends on tokens with an entropy of")
    times("attention_collapse", "attention_entropy", 1.25, True, "the entropy of attention is")
    times("vanishing_gradients", "gain_least", 2.0, True, "the least gain of gradients in a block is")
    times("exploding_gradients", "gain_most", 2.0, False, "the largest gain of gradients in a block is")
    times("logit_growth", "logit_deviation", 1.5, False, "logits deviate by")
    times("dead_block", "block_adds", 4.0, True, "a block adds to what it is given a share of")
    more("dead_units", "dead_units", 0.1, "hidden units are zero:")
    more("dead_experts", "experts_unused", 0.1, "experts are not chosen:")
    alike = [1 - value(f"{prefix}_attention_entropy") for prefix in ("own", "usual")]  # type: ignore[operator]
    if alike[1] > 1e-5 and alike[0] < 0.05 * alike[1]:
        scores["attention_collapse"] = 1.5, "attention weighs all tokens alike"
    leaks = {"sees_future": "sees_future", "sees_documents": "mask_leak", "sees_rows": "mask_leak"}
    for name, cause in leaks.items():
        if (share := value(f"now_{name}")) > 1e-3:  # type: ignore[operator]
            scores[cause] = 100.0, f"logits move by {share:.1%} with tokens that they must not see"
    return scores


def rates(case: Case) -> Iterator[Finding]:
    """The learning rate is not that of the configured schedule."""
    steps, rate, planned = case.together("train/lr", "doctor/plain_rate")
    known = planned > 0
    steps, rate, planned = steps[known], rate[known], planned[known]
    if not len(steps):
        return
    rate = np.maximum(rate, 1e-30)
    ratio = rate / planned
    bad = np.abs(np.log(ratio)) > math.log(1.2)
    if not bad.any():
        return
    at = np.flatnonzero(bad)
    since, resumed = int(steps[at[0]]), case.series("doctor/resumed").steps
    high = float(np.median(ratio[bad])) > 1
    if len(resumed) and since >= resumed[0] > steps[0]:
        cause = "schedule_restarted"
    elif len(at) <= BRIEF and at[0] > 0 and at[-1] < len(steps) - 1 and high:
        cause = "spike_by_optimizer"
    else:
        cause = _course(steps, rate, planned, bad)
    worst = int(at[np.argmax(np.abs(np.log(ratio[bad])))])
    yield found(
        case,
        cause,
        since,
        f"the rate is {rate[worst]:.3g} in step {steps[worst]}, and {planned[worst]:.3g} as it is configured",
        0.932,
    )


def _course(steps: np.ndarray, rate: np.ndarray, planned: np.ndarray, bad: np.ndarray) -> str:
    """Returns the cause for which a rate takes its course: the planned one later, slower, faster, larger or smaller; or how it drifts.

    Of one that is moved or stretched, few rates differ from those of other steps of the plan.
    """
    high = float(np.median(np.log(rate / planned)[bad])) > 0
    if len(steps) < 6:
        return "rate_too_high" if high else "rate_too_low"
    errors = dict[str, float]()
    for cause, times in (
        ("no_warmup", [(1.0, float(by)) for by in range(2, len(steps) // 2)]),
        ("schedule_ends_early", [(by, 0.0) for by in (1.5, 2.0, 3.0, 4.0, 8.0, 16.0)]),
        ("warmup_too_long", [(1 / by, 0.0) for by in (1.5, 2.0, 3.0, 4.0, 8.0, 16.0)]),
    ):
        for scale, shift in times:
            moved = np.maximum(np.interp(scale * steps + shift, steps, planned), 1e-30)
            begins = abs(math.log(rate[0] / moved[0])) < 0.1  # also where it is moved to
            if begins or cause != "no_warmup":
                error = float(np.median(np.abs(np.log(rate / moved))))
                errors[cause] = min(errors.get(cause, 9.0), error)
    best = min(errors, key=lambda one: errors[one], default="")
    ratio = rate / planned
    third = max(len(ratio) // 3, 2)
    start, end = (float(np.median(ratio[chosen])) for chosen in (slice(third), slice(-third, None)))
    if best and errors[best] < 0.02 and not 0.98 < end / start < 1.02:
        return best
    if high:
        first_alone = np.flatnonzero(bad & (ratio > 1))
        return (
            "no_warmup"
            if len(first_alone) and first_alone[-1] <= int(np.argmax(planned))
            else "rate_too_high"
        )
    if not 0.67 < end / start < 1.5:
        return "warmup_too_long" if end > start else "schedule_ends_early"
    return "rate_too_low"


def updates(case: Case) -> Iterator[Finding]:
    """A step changes weights otherwise than the configured optimizer does with the same gradients and state."""
    if not len(case.together("doctor/update_times", "doctor/update_rest")[0]):
        return
    foreign = not is_known(str((case.option("model.optimizer") or {}).get("class_path", "")))
    sure = 0.9 if foreign else 0.933
    if named := [*_added_decay(case, sure)] or [*_added_epsilon(case, sure)]:
        yield from named
        return
    yield from _clipping(case)
    yield from [*_moments(case, sure)] or _size_of_updates(case, sure)


def _added_decay(case: Case, sure: float) -> Iterator[Finding]:
    decays = case.worst("doctor/update_decays_most", 0.005)
    if (decay := case.worst("doctor/decay_more", 0.01)) or decays:
        since = (decay or decays or (0,))[0]
        what = (
            f"{decays[1]:.2%} of a weight is taken off in a step"
            if decays
            else f"weight_decay is {decay[1] if decay else 0:.2g} larger"
        )
        yield found(case, "weight_decay_too_large", since, f"besides the configured update {what}", sure)


def _added_epsilon(case: Case, sure: float) -> Iterator[Finding]:
    eps, fitted = case.worst("doctor/eps_times", 100), case.worst("doctor/fitted_eps", 1e-7)
    if eps or fitted:
        since, value = eps or fitted or (0, 0.0)
        what = (
            f"the optimizer's eps is {value:.2g} times the configured one"
            if eps
            else f"updates are those of an eps of {value:.2g}"
        )
        yield found(case, "epsilon_too_large", since, what, sure)


def _moments(case: Case, sure: float) -> Iterator[Finding]:
    """What the optimizer keeps is not what its gradients make of it."""
    if memory := case.worst("doctor/memory_times", 0.5, above=False) or case.worst(
        "doctor/memory_times", 2.0
    ):
        cause = "optimizer_state_lost" if memory[1] < 1 else "stale_gradients"
        yield found(
            case,
            cause,
            memory[0],
            f"the optimizer remembers {memory[1]:.2g} times as many steps as is configured",
            sure,
        )
        return
    more = case.worst("doctor/state_squares_larger", 0.05)
    changed = [
        case.worst(f"doctor/state_{one}", 0.05)
        for one in ("means_larger", "means_smaller", "squares_smaller")
    ]
    lost = changed[1] or changed[2]
    if more and not any(changed):
        yield found(
            case, "epsilon_too_large", more[0], f"something is added to the means of squared gradients of {more[1]:.0%} of the tensors, as an "
            "epsilon would be", sure,
        )  # fmt: skip
    elif changed[0] and not lost:
        yield found(
            case, "spike_by_optimizer", changed[0][0], "a mean of gradients is larger than its gradients make it", sure - 0.001
        )  # fmt: skip
    elif lost:
        yield found(
            case, "optimizer_state_lost", lost[0], f"after a step {lost[1]:.0%} of the optimizer's moments are not what its gradients make of "
            "those before", sure,
        )  # fmt: skip


def _size_of_updates(case: Case, sure: float) -> Iterator[Finding]:
    steps, times, rest = case.together("doctor/update_times", "doctor/update_rest")
    _, _, rate = case.together("doctor/update_times", "doctor/rate_times")
    times = times / np.where(rate > 0, rate, 1.0) if len(rate) == len(times) else times
    wrong = (np.abs(np.log(np.maximum(times, 1e-30))) > math.log(1.5)) & (rest < 0.3)
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    high = times[index] > 1
    brief = wrong.sum() == 1 and index < len(steps) - 1 and index > 0
    cause = "spike_by_optimizer" if brief and high else "rate_too_high" if high else "rate_too_low"
    what = f"a step changes weights {times[index]:.3g} times as much as it is configured"
    yield found(case, cause, int(steps[index]), what, sure - 0.01)


def _clipping(case: Case) -> Iterator[Finding]:
    low = case.worst("doctor/clipped_times", 0.5, above=False)
    if (
        low
        and not case.worst("doctor/gradient_ratio", 1.5)
        and not case.worst("doctor/gradient_ratio", 0.67, above=False)
    ):
        evidence = f"after clipping gradients have {low[1]:.2g} of the norm that they are to be clipped to"
        yield found(case, "clip_too_low", low[0], evidence, 0.942)


def between(case: Case) -> Iterator[Finding]:
    """Weights or the optimizer's state change between steps, or there are steps besides those of the loop."""
    more, validated = case.series("doctor/steps_more"), case.series("val/loss").steps
    extra = more.values > 0
    if extra.any():
        steps = more.steps[extra]
        at = f"{more.values[extra].max():.0f} optimizer steps are made besides that of step {steps[0]}"
        if len(validated) and np.isin(steps - 1, validated).all():
            yield found(case, "validation_leak", int(steps[0]), f"{at}, behind a validation", 0.95)
        elif len(steps) <= BRIEF:
            yield found(case, "spike_by_optimizer", int(steps[0]), at, 0.95)
        else:
            yield found(case, "rate_too_high", int(steps[0]), at, 0.92)
        return
    if lost := case.worst("doctor/state_not_restored", 0.5):
        yield found(
            case, "optimizer_state_lost", lost[0], "the optimizer's state is not that of the checkpoint", 0.94
        )
    elif grown := case.worst("doctor/squares_grown", 0.05):
        evidence = f"the means of squared gradients of {grown[1]:.0%} of the tensors are larger than after the step before"
        yield found(case, "epsilon_too_large", grown[0], evidence, 0.935)
    elif moved := case.worst("doctor/state_moved", 0.05):
        evidence = f"{moved[1]:.0%} of the optimizer's state is another one than after the step before"
        once = int((case.series("doctor/state_moved").values > 0.05).sum()) == 1
        yield found(case, "optimizer_state_lost", moved[0], evidence, 0.77 if once else 0.935)
    yield from _moved(case, validated)


def _moved(case: Case, validated: np.ndarray) -> Iterator[Finding]:
    """Weights change between steps: over validations, once, or each time, and then which and whether they grow."""
    weights = beyond(case, "doctor/weights_moved", 0.0)
    if weights is None:
        return
    since, share = int(weights[0].steps[0]), weights[0].values.max()
    grown = float(np.median(case.series("doctor/weights_grown").since(since).values))
    of_ends = float(np.median(case.series("doctor/weights_moved_at_ends").since(since).values))
    start = f"between steps {share:.0%} of the weights change"
    resumed = case.series("doctor/resumed").steps
    if len(validated) and np.isin(weights[0].steps - 1, validated).all():
        yield found(case, "average_wrong", since, f"a validation changes {share:.0%} of the weights", 0.92)
    elif len(resumed) and np.isin(weights[0].steps, resumed).all():
        yield found(case, "weights_not_restored", since, start, 0.955)
    elif back := _taken_back(case):
        cause = "weights_not_updated" if back[0] > 0.995 else "rate_too_low"
        older = back[0] > 1.5  # more than the last step: weights of long before are put back
        cause = cause if back[1] > 0.995 or older else "weight_decay_too_large"
        yield found(case, cause, since, f"{start}: {back[0]:.0%} of a step is taken back", 0.944)
    elif weights[1]:
        yield found(case, "spike_by_optimizer", since, f"{start}, and not in other steps", 0.68)
    elif grown > 0.002 and of_ends > 0.99:
        yield found(
            case,
            "logit_growth",
            since,
            f"{start}: those of the head or the last norm grow by {grown:.1%}",
            0.9,
        )
    elif abs(grown) < 2e-3 and share > 0.5:
        yield found(case, "low_precision_weights", since, f"{start} a little, as if they were rounded", 0.9)


def step_sizes(case: Case) -> Iterator[Finding]:
    """A few steps move weights far more than the others for their rate, or again and again one does not move them."""
    steps, sizes, rate = case.together("doctor/step_size", "train/lr")
    later = (steps > SETTLED) & (rate > 1e-3 * rate.max(initial=0.0))
    steps, each = steps[later], sizes[later] / rate[later]
    usual = float(np.median(each)) if len(each) >= SETTLED else math.nan
    still = steps[each == 0]
    if len(still) >= 2:
        yield found(
            case, "weights_not_updated", int(still[0]), f"in {len(still)} of {len(each)} steps no weight changes", 0.9
        )  # fmt: skip
    elif (far := each > 6 * usual).any() and far.sum() <= BRIEF:
        yield found(
            case, "spike_by_optimizer", int(steps[far][0]), f"a step moves weights {each.max() / usual:.3g} times as far for its rate as others",
            0.79,
        )  # fmt: skip


SETTLED = 6
"""Steps after which Adam's moments are no longer those of the first one."""


def _taken_back(case: Case) -> tuple[float, float] | None:
    """Returns which share of steps is taken back before the next ones, and how nearly nothing else is changed; None: none is."""
    _, back, cosine = case.together("doctor/step_back", "doctor/step_back_cosine")
    if len(back) <= BRIEF or not (np.median(cosine) > 0.9 and np.median(back) > 0.3):
        return None
    return float(np.median(back)), float(np.median(cosine))


RULES: tuple[Rule, ...] = (initial_weights, network, rates, updates, between, step_sizes)
