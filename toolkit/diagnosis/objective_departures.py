"""Rules about losses and gradients that are not those of leyden's objective and of leyden's network: figures of `network_comparison`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.departures import symptoms
from toolkit.diagnosis.foreign import APART, beyond, found


def backward(case: Case) -> Iterator[Finding]:
    """Gradients of the network are not those of leyden's, though it computes the same."""
    bad = beyond(case, "doctor/backward_apart", APART)
    if bad is None:
        return
    step = int(bad[0].steps[0])
    if (apart := case.worst("doctor/forward_apart", APART)) and apart[0] < step:
        return  # another function: `network` says why

    def at(name: str, otherwise: float) -> float:
        return case.at(f"doctor/backward_{name}", step, otherwise)

    least, most, cosine, lost, holes = (at(one, 0.0) for one in ("least", "most", "cosine", "lost", "holes"))
    if lost > 0 and (stopped := _stopped(case, bad[0].steps)):
        cause, what = stopped
    elif lost > 0 and holes < 0.01:
        cause, what = "frozen_weights", f"{lost:.0%} of the weights get none"
    elif most > 1.5 and most * least > 1:
        cause, what = "exploding_gradients", f"a tensor's is {most:.3g} times as large"
    elif least < 0.67 and holes < 0.05:
        cause, what = "vanishing_gradients", f"a tensor's is {least:.2g} of that"
    elif at("single", holes) >= 0.01 and at("single_size", 1.0) < 0.3:
        cause, what = (
            "fp16_underflow",
            f"{at('single', holes):.0%} are zero, here and there, and these should be small",
        )
    elif at("coarse", 0.0) > 0.9:
        cause, what = "fp16_underflow", f"they have the digits of a type of 16 bits (cosine {cosine:.4f})"
    elif case.at("doctor/forward_apart", step) > SAME:
        return  # another function with other gradients: `network` says why
    elif holes >= 0.01:
        cause, what = "frozen_weights", f"{holes:.0%} of the weights get none"
    else:
        cause, what = "gradient_scale", f"they point elsewhere (cosine {cosine:.2f})"
    yield found(
        case, cause, step, f"gradients differ from those of leyden's network, which computes the same: {what}", 0.956
    )  # fmt: skip


def _stopped(case: Case, steps: Iterable[int]) -> tuple[str, str] | None:
    """Returns which part of the network has stopped to depend on its weights, and what shows it: they get no gradient for that; None: none has."""
    for step in steps:
        scores = symptoms(lambda name, step=int(step): case.at(f"doctor/{name}", step))
        stopped = [cause for cause in STOPPED if scores.get(cause, (0.0, ""))[0] >= 1]
        if stopped:
            return stopped[0], scores[stopped[0]][1]
    return None


STOPPED = ("dead_block", "attention_collapse", "dead_units", "dead_experts")

SAME = 1e-5
"""Relative difference of logits that rounding explains."""


def objective(case: Case) -> Iterator[Finding]:
    """The objective is not leyden's with the same options: a factor, other labels, or another term."""
    steps, factors, rests = case.together("doctor/objective_factor", "doctor/objective_rest")
    supposed = case.last("doctor/objective_supposed") > 0
    for step, factor, rest in zip(steps, factors, rests, strict=True):
        if abs(factor - 1) > 0.05 or rest > 0.01:
            named = _of_supposed if supposed else _of_objective
            if said := named(case, int(step), float(factor), float(rest)):
                start = "the loss is not that of leyden's objective with the same options"
                start = "the loss is not that of next-token prediction" if supposed else start
                yield found(case, said[0], int(step), f"{start}: {said[1]}", 0.94 if supposed else 0.955)
                return


def _of_supposed(case: Case, step: int, factor: float, rest: float) -> tuple[str, str] | None:
    """Says why the loss of an objective is another one that need not be next-token prediction: only what nobody means it to be."""

    def at(name: str, otherwise: float) -> float:
        return case.at(f"doctor/objective_{name}", step, otherwise)

    follows, elsewhere, labelled = at("next", 1.0), at("elsewhere", 0.0), at("labelled", 1.0)
    if rest < 0.05 and not 0.67 < factor < 1.5:
        return "gradient_scale", f"it is {factor:.3g} times as large"
    if follows < 0.5 < elsewhere and labelled > 0.8:
        return (
            "labels_shifted",
            f"{follows:.0%} of the labels that it takes are the next token, {elsewhere:.0%} are tokens elsewhere",
        )
    if follows > 0.5 > labelled:
        return "few_labels", f"{labelled:.0%} of the labelled tokens have a loss"
    if follows > 0.5 and rest > 0.02 and at("slope", 0.0) < STRAIGHT:
        return "logit_growth", "the difference makes logits larger"
    return None


STRAIGHT = -0.2
"""How straight a difference pushes logits up that is no mere weight of tokens; -1 at most."""


def _of_objective(case: Case, step: int, factor: float, rest: float) -> tuple[str, str]:
    """Says why the loss of an objective is not that of leyden's own."""

    def at(name: str, otherwise: float) -> float:
        return case.at(f"doctor/objective_{name}", step, otherwise)

    if rest < 0.05 < abs(factor - 1):
        cause, what = "gradient_scale", f"it is {factor:.3g} times as large"
    elif at("labelled", 1.0) < 0.8:
        cause, what = "few_labels", f"{at('labelled', 1.0):.0%} of the labelled tokens have a loss"
    elif at("next", 1.0) < 0.5:
        cause, what = (
            "labels_shifted",
            f"{at('next', 1.0):.0%} of the labels that it takes are the next token",
        )
    elif at("of_weights", 0.0) > 0.5:
        cause, what = (
            "weight_decay_too_large",
            f"{at('of_weights', 0.0):.0%} of the difference draws weights to zero",
        )
    elif at("routers", 0.0) > 3 * rest:
        cause, what = "dead_experts", f"gradients of routers differ by {at('routers', 0.0):.2g} of their size"
    elif at("slope", 0.0) < 0:
        cause, what = "logit_growth", "the difference makes logits larger"
    else:
        cause, what = "gradient_scale", f"its gradient differs by {rest:.0%}"
    return cause, what


RULES: tuple[Rule, ...] = (backward, objective)
