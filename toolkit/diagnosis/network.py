"""Rules about the network: what it sees, how it is initialised, dead units and experts, attention, logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import network_remedy, suspects, without_callbacks


def _advice(case: Case, otherwise: str) -> str:
    return f"Leave out {suspects(case)}, which is not leyden's" if suspects(case) else otherwise


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
    deviation = case.last("doctor/initial_logit_deviation")
    if not len(loss) or vocabulary < 2 or loss.steps[0] > 4 or case.option("model.weights"):
        return
    uniform = math.log(vocabulary)
    if loss.values[0] > 1.25 * uniform + 0.5:
        yield Finding(
            "bad_initialisation", int(loss.steps[0]), f"the first loss is {loss.values[0]:.3g}, and log of the vocabulary "
            f"{uniform:.3g}: weights are too large", 0.88,
            _advice(case, "Initialise as GPT-2, N(0, 0.02)"), without_callbacks(case),
        )  # fmt: skip
    if deviation < 0.02:
        yield Finding(
            "bad_initialisation", 1, f"before the first step logits differ by {deviation:.2g} only: weights are too small", 0.88,
            _advice(case, "Initialise as GPT-2, N(0, 0.02)"), without_callbacks(case),
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
    """Nearly all hidden units of a block are zero before the first step; later on, that is a consequence."""
    share = case.last("doctor/initial_dead_units")
    if share > 0.5:
        yield Finding(
            "dead_units", 1, f"before the first step {share:.1%} of the hidden units of a block are zero for all tokens", 0.91,
            _advice(case, "Take activation=gelu_tanh"),
            without_callbacks(case) or {"model": {"network": {"init_args": {"activation": "gelu_tanh"}}}},
        )  # fmt: skip


def attention_collapse(case: Case) -> Iterator[Finding]:
    """Attention looks at one token before the first step; later on, that is a consequence, or learned."""
    entropy = case.last("doctor/initial_attention_entropy")
    if entropy < 0.5:
        yield Finding(
            "attention_collapse", 1, f"before the first step the entropy of attention weights in a block is {entropy:.0%} of that "
            "of equal ones", 0.87,
            _advice(case, "Normalise queries and keys, as Qwen3 does"), without_callbacks(case),
        )  # fmt: skip


def dead_experts(case: Case) -> Iterator[Finding]:
    """Some experts get hardly any tokens."""
    load = case.series("routing/min_load")
    window = 12
    if len(load) < window:
        return
    recent = load.values[-window:]
    if recent.max() < 0.01:
        starved = load.values >= 0.01
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
