"""Diagnosis of a run from its figures and its configuration: causes, evidence, remedies.

`diagnose` goes through all rules. A rule is a function of a `Case` alone, so that a live run and a finished one are judged
alike; rules of one field are in one module. `data_probes`, `network_probes` and `gradient_probes` measure what no figure of
training shows. `comparisons` compares a run that has parts of others with what leyden's own would do: `departures`, `objective_departures`
and `row_departures` judge that.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.diagnosis import (
    data,
    departures,
    gradients,
    network,
    objective_departures,
    optimization,
    row_departures,
    runs,
    speed,
)
from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.history import History, read_history
from toolkit.diagnosis.report import read_config, write_findings, write_remedy

__all__ = [
    "RULES",
    "Case",
    "Finding",
    "History",
    "Rule",
    "diagnose",
    "read_config",
    "read_history",
    "write_findings",
    "write_remedy",
]

RULES: tuple[Rule, ...] = (
    *departures.RULES,
    *objective_departures.RULES,
    *row_departures.RULES,
    *data.RULES,
    *network.RULES,
    *gradients.RULES,
    *optimization.RULES,
    *speed.RULES,
    *runs.RULES,
)


DIVERGED = (
    "non_finite", "low_precision_weights", "clip_too_low", "fp16_underflow", "stale_gradients", "weight_decay_too_large", "dropout_too_high",
    "spike_by_data", "logit_growth", "attention_collapse", "dead_units", "exploding_gradients",
)  # fmt: skip
"""What is found later in a run whose weights have been moved wildly: comparisons of numbers no longer say anything there."""

DIVERGING = ("rate_too_high", "no_warmup")
"""Causes of that, which are named first."""


def diagnose(case: Case) -> list[Finding]:
    """Returns what is found, the most certain first, but what another finding explains behind that; each cause once."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        for finding in rule(case):
            if finding.cause not in found or found[finding.cause].confidence < finding.confidence:
                found[finding.cause] = finding
    for cause in found.keys() & set(DIVERGING):
        for led_to in found.keys() & set(DIVERGED):
            first, later = found[cause], found[led_to]
            if first.since < later.since and first.confidence <= later.confidence:
                found[led_to] = replace(later, confidence=first.confidence - 0.01)
    return sorted(found.values(), key=lambda finding: (-finding.confidence, finding.since))
