"""Findings about parts that are not leyden's: what takes them out of the run, and how long a figure is odd."""

from __future__ import annotations

import numpy as np

from toolkit.diagnosis.case import Case, Finding
from toolkit.diagnosis.history import Series
from toolkit.diagnosis.parts import packing_remedy, suspects, taken_out

BRIEF = 4
"""Logged steps that a passing fault takes at most."""

KINDS = ("network", "embedding", "attention", "mlp", "norm", "router", "head", "block", "matrix")
"""What a part that differs may be; `doctor/part_kind` is its place here."""

APART = 2e-3
"""Relative difference of what rounding does not explain."""


def found(case: Case, cause: str, since: int, evidence: str, confidence: float) -> Finding:
    """Returns a finding whose remedy takes the foreign parts out that may be at fault."""
    advice = (
        f"Leave out {suspects(case)}, which is not leyden's" if suspects(case) else "Take leyden's own part"
    )
    packing, others = packing_remedy(case), taken_out(case)
    remedy = (packing or others) if cause in OF_DATA else (others or packing)
    return Finding(cause, since, evidence, confidence, advice, remedy)


OF_DATA = (
    "labels_shifted", "few_labels", "mask_leak", "position_ids", "tokenizer_mismatch", "duplicates", "not_shuffled",
    "validation_leak", "over_fitting", "data_restarted",
)  # fmt: skip


def beyond(case: Case, name: str, limit: float) -> tuple[Series, bool] | None:
    """Returns the steps in which a figure is above a limit, and whether it passes: few steps, and not the last ones."""
    series = case.series(name)
    bad = series.values > limit
    if not bad.any():
        return None
    at = np.flatnonzero(bad)
    passes = len(at) <= BRIEF and at[0] > 0 and (len(series) - 1 - at[-1]) >= min(2, len(at))
    return Series(series.steps[bad], series.values[bad]), bool(passes)
