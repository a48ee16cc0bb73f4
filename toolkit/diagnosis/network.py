"""Rules about the network: what it sees, how it is initialised, dead units and experts, attention, logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import network_remedy, suspects, without_callbacks


def _advice(case: Case, otherwise: str) -> str:
    return f"Leave out {suspects(case)}, which is not leyden's" if suspects(case) else otherwise


def _own(confidence: float, since: int) -> float:
    """Returns the confidence that a state is a cause: one that training has led to is more likely a consequence."""
    return confidence if since <= 2 else 0.55


def sees_future(case: Case) -> Iterator[Finding]:
    """Logits depend on the tokens that are predicted."""
    share = case.last("doctor/sees_future")
    if case.is_causal and share > 1e-3:
        yield Finding(
            "sees_future", 1, f"logits move by {share:.1%} with tokens that follow", 0.985,
            "Take a network whose attention is causal", network_remedy(case),
        )  # fmt: skip


def bad_initialisation(case: Case) -> Iterator[Finding]:
    """The first loss is far from that of a uniform guess, or logits do not differ."""
    loss, vocabulary = case.series("train/loss"), case.number("model.network.vocab_size", 0)
    deviation = case.series("doctor/logit_deviation")
    if not len(loss) or vocabulary < 2 or loss.steps[0] > 4 or case.option("model.weights"):
        return
    uniform = math.log(vocabulary)
    if loss.values[0] > 1.25 * uniform + 0.5:
        yield Finding(
            "bad_initialisation", int(loss.steps[0]), f"the first loss is {loss.values[0]:.3g}, and log of the vocabulary "
            f"{uniform:.3g}: weights are too large", 0.8,
            _advice(case, "Initialise as GPT-2, N(0, 0.02)"), without_callbacks(case),
        )  # fmt: skip
    if len(deviation) and deviation.values[0] < 1e-3:
        yield Finding(
            "bad_initialisation", int(deviation.steps[0]), f"the first logits differ by {deviation.values[0]:.2g} only: "
            "weights are too small", 0.8, _advice(case, "Initialise as GPT-2, N(0, 0.02)"), without_callbacks(case),
        )  # fmt: skip


def logit_growth(case: Case) -> Iterator[Finding]:
    """Logits grow from one look to the next, to where the softmax is saturated."""
    spread = case.series("doctor/logit_deviation")
    before, after = spread.values[:-1], spread.values[1:]
    grows = (before > 4) & (after > 12) & (after > 1.5 * before)
    if grows.any():
        at = int(np.argmax(grows))
        yield Finding(
            "logit_growth", int(spread.steps[at]), f"logits deviate by {before[at]:.3g}, then by {after[at]:.3g} at step "
            f"{spread.steps[at + 1]}; below 5 is usual", 0.79,
            _advice(case, "Keep logits small with a z-loss"),
            without_callbacks(case) or {"model": {"objective": {"init_args": {"z_loss": 1e-4}}}},
        )  # fmt: skip


def dead_units(case: Case) -> Iterator[Finding]:
    """Nearly all hidden units of a block are zero."""
    zeros = case.series("doctor/dead_units")
    bad = zeros.values > 0.9
    if bad.any():
        first = zeros.first_step(bad)
        yield Finding(
            "dead_units", first, f"{zeros.values[bad][0]:.1%} of the hidden units of a block are zero for all tokens", _own(0.91, first),
            _advice(case, "Take activation=gelu_tanh, or a lower rate"),
            without_callbacks(case) or {"model": {"network": {"init_args": {"activation": "gelu_tanh"}}}},
        )  # fmt: skip


def attention_collapse(case: Case) -> Iterator[Finding]:
    """Attention looks at one token."""
    entropy = case.series("doctor/attention_entropy")
    bad = entropy.values < 0.1
    if bad.any():
        first = entropy.first_step(bad)
        yield Finding(
            "attention_collapse", first, f"the entropy of attention weights in a block is "
            f"{entropy.values[bad][0]:.0%} of that of equal ones", _own(0.87, first),
            _advice(case, "Normalise queries and keys, as Qwen3 does"), without_callbacks(case),
        )  # fmt: skip


def dead_experts(case: Case) -> Iterator[Finding]:
    """Some experts get hardly any tokens."""
    load = case.series("routing/min_load")
    window = 10
    if len(load) < window:
        return
    recent = load.values[-window:]
    if recent.max() < 0.03:
        starved = load.values >= 0.03
        since = int(load.steps[int(np.flatnonzero(starved)[-1]) + 1 if starved.any() else 0])
        yield Finding(
            "dead_experts", since, f"an expert got at most {recent.max():.2g} of its share in {window} logged steps", 0.74,
            "Balance the experts with BalancedRouting or BiasBalancing",
            {
                **without_callbacks(case),
                "model": {"objective": {"class_path": "BalancedRouting", "init_args": {"load_balancing": 0.01, "z_loss": 0.001}}},
            },
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    sees_future, bad_initialisation, logit_growth, dead_units, attention_collapse, dead_experts,
)  # fmt: skip
