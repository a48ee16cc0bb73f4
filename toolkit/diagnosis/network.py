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
    """Logits are so large that the softmax is saturated."""
    largest = case.series("doctor/max_logit")
    bad = largest.values > 60
    if bad.any():
        yield Finding(
            "logit_growth", largest.first_step(bad), f"the largest logit is {largest.values[bad][0]:.3g}", 0.82,
            _advice(case, "Keep logits small with a z-loss"),
            without_callbacks(case) or {"model": {"objective": {"init_args": {"z_loss": 1e-4}}}},
        )  # fmt: skip


def dead_units(case: Case) -> Iterator[Finding]:
    """Nearly all hidden units of a block are zero."""
    for index, zeros in enumerate(case.blocks("activation", "/zeros")):
        bad = zeros.values > 0.97
        if bad.any():
            yield Finding(
                "dead_units", zeros.first_step(bad), f"{zeros.values[bad][0]:.1%} of the hidden units of block {index} are zero",
                0.91, _advice(case, "Take activation=gelu, or a lower rate"),
                without_callbacks(case) or {"model": {"network": {"init_args": {"activation": "gelu"}}}},
            )  # fmt: skip
            return


def attention_collapse(case: Case) -> Iterator[Finding]:
    """Attention looks at one token, from the beginning."""
    for index, entropy in enumerate(case.blocks("attention", "/entropy")):
        bad = entropy.values < 0.15
        if bad.any():
            yield Finding(
                "attention_collapse", entropy.first_step(bad), f"the entropy of the attention of block {index} is "
                f"{entropy.values[bad][0]:.2g} nats", 0.87,
                _advice(case, "Normalise queries and keys, as Qwen3 does"), without_callbacks(case),
            )  # fmt: skip
            return


def dead_experts(case: Case) -> Iterator[Finding]:
    """Some experts get hardly any tokens."""
    load = case.series("routing/min_load")
    window = 6
    if len(load) < window:
        return
    recent = np.array([load.values[max(0, i - window + 1) : i + 1].max() for i in range(len(load))])
    bad = (recent < 0.05) & (np.arange(len(load)) >= window - 1)
    if bad.any():
        yield Finding(
            "dead_experts", load.first_step(bad), f"an expert gets {load.values[-1]:.2g} of its share of the tokens", 0.86,
            "Balance the experts with BalancedRouting or BiasBalancing",
            {
                **without_callbacks(case),
                "model": {"objective": {"class_path": "BalancedRouting", "init_args": {"load_balancing": 0.01, "z_loss": 0.001}}},
            },
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    sees_future, bad_initialisation, logit_growth, dead_units, attention_collapse, dead_experts,
)  # fmt: skip
