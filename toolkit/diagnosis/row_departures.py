"""Rules about rows that are not those which leyden's own packing reads: figures of `row_comparison`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.foreign import beyond, found
from toolkit.diagnosis.parts import guard_remedy

FEW = 0.02
"""A share of labels, tokens or rows that is no chance."""


def contents(case: Case) -> Iterator[Finding]:
    """Rows have the tokens that they should have, and other labels, documents or positions."""
    for where in ("", "validation_"):
        of = " of validation rows" if where else ""
        other, missing = (case.worst(f"doctor/{where}rows_labels_{one}", FEW) for one in ("other", "missing"))
        brief = beyond(case, "doctor/rows_labels_other", FEW)
        if other and (not missing or other[1] > 0.3 * missing[1]):
            cause = "spike_by_data" if brief and brief[1] and not where else "labels_shifted"
            yield found(
                case,
                cause,
                other[0],
                f"{other[1]:.0%} of the labels{of} are others than those of the stored tokens",
                0.99,
            )
        elif missing and missing[1] > 0.2:
            yield found(
                case, "few_labels", missing[0], f"{missing[1]:.0%} of the labels{of} are missing", 0.96
            )
        joined = case.worst(f"doctor/{where}rows_joined", FEW) or case.worst(
            f"doctor/{where}rows_parted", FEW
        )
        wrong = case.worst(f"doctor/{where}rows_positions", 0.01)
        if joined:
            evidence = f"{joined[1]:.0%} of the boundaries of documents{of} are not where the stored ones are"
            yield found(case, "mask_leak", joined[0], evidence, 0.98 if wrong else 0.988)
        if wrong:
            evidence = f"{wrong[1]:.0%} of the positions{of} are not those of their documents"
            yield found(case, "position_ids", wrong[0], evidence, 0.985)


def origin(case: Case) -> Iterator[Finding]:
    """Rows are others than those that the stored tokens have at this position: where they come from says why."""
    for where in ("", "validation_"):
        bad = beyond(case, f"doctor/{where}rows_other", 0.0)
        if bad is None:
            continue
        steps, passes = bad
        since, count = int(steps.steps[0]), len(steps)

        def usual(name: str, where: str = where) -> float:
            values = case.series(f"doctor/{where}rows_{name}").values
            return float(np.median(values)) if len(values) else 0.0

        trained, held_out, before, near = (
            usual(name) for name in ("in_training", "in_validation", "came_before", "near")
        )
        start = f"{float(steps.values.max()):.0%} of the rows{' of validation' if where else ''} of a batch are not those that come at this position"
        resumed = case.series("doctor/resumed").steps
        after_resume = (
            len(resumed) > 0
            and since >= resumed[0]
            and case.series("doctor/rows_other").steps[0] < resumed[0]
        )
        if where:
            leaks = trained > 0.5
            evidence = f"{start}; {trained:.0%} of their text is in the training text"
            yield found(case, "validation_leak" if leaks else "tokenizer_mismatch", since, evidence, 0.955)
        elif held_out > max(0.5, trained):
            yield found(
                case,
                "validation_leak",
                since,
                f"{start}: {held_out:.0%} of their text is validation text",
                0.955,
            )
        elif usual("one_id") > 0.9 and usual("kept") > 0.1 and usual("always") < 0.95:
            evidence = f"{start}: one token takes the place of {1 - usual('kept'):.0%} of theirs"
            yield found(case, "dropout_too_high", since, evidence, 0.957)
        elif max(trained, held_out) < 0.5 or usual("kept") > 0.5:
            evidence = (
                f"{start}: {1 - usual('kept'):.0%} of the tokens are others, and {1 - max(trained, held_out):.0%} of the text is not in "
                "the stored tokens"
            )
            finding = found(case, "spike_by_data" if passes else "tokenizer_mismatch", since, evidence, 0.955)
            yield _guarded(case, finding) if passes else finding
        elif after_resume:
            yield found(case, "data_restarted", since, f"after the resume {start}", 0.955)
        elif before > 0.3 and count > 1:
            yield found(case, "duplicates", since, f"{start}, and {before:.0%} of these came before", 0.938)
        elif not passes:
            sure = 0.935 if near > 0.3 else 0.75
            yield found(
                case,
                "not_shuffled",
                since,
                f"{start}; {near:.0%} of these are next to another of the batch in the text",
                sure,
            )


def _guarded(case: Case, finding: Finding) -> Finding:
    remedy = finding.remedy or guard_remedy(case, finding.since)
    return Finding(finding.cause, finding.since, finding.evidence, finding.confidence, finding.advice, remedy)


RULES: tuple[Rule, ...] = (contents, origin)
