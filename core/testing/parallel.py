"""Proofs for strategies, precisions and data modules."""

from __future__ import annotations

import math

from core.testing.case import Case
from core.testing.proof import proof, require
from core.testing.training import STEPS, fit, furthest, plain, whole

NEARNESS = 0.02
"""Relative: fp8 keeps 3 bits of mantissa, 2^-4, of each factor, which sums over a row average out."""


@proof("strategies")
def computes_what_one_device_does(case: Case) -> None:
    """On the processes that it needs it computes what one process does without it."""
    apart, where = furthest(whole(case), plain(case))
    require(apart <= case.tolerance, f"{where} with it and without (tolerance {case.tolerance:g})")


@proof("precision")
def stays_near_float32(case: Case) -> None:
    """The losses of the tiny run are within 2% of float32's, and fall as they do."""
    found, expected = (done.record["losses"] for done in (whole(case), plain(case)))
    for number, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        require(
            math.isclose(one, other, rel_tol=NEARNESS),
            f"loss {one:.4f} in step {number}, {other:.4f} in float32",
        )


@proof("datamodules")
def gives_other_rows_in_each_step(case: Case) -> None:
    """Batches are mappings with `input_ids` and `labels`, and no two steps of an epoch get the same."""
    inputs = whole(case).record["inputs"]
    first = inputs[: min(STEPS, 5)]
    same = [(a + 1, b + 1) for b in range(len(first)) for a in range(b) if first[a] == first[b]]
    require(not same, f"steps {same and same[0]} are given the same rows")


@proof("datamodules")
def validation_is_the_same_each_time(case: Case) -> None:
    """Each validation sees the same batches: with weights that do not change, the same loss."""
    frozen = fit(case, "frozen", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.0")
    require(frozen.code == 0, f"`fit` ended with exit code {frozen.code}:\n{frozen.complaint}")
    seen = [f["val/loss"] for f in frozen.record["figures"].values() if "val/loss" in f]
    require(len(seen) >= 2, f"{len(seen)} validations in {STEPS} steps")
    require(len(set(seen)) == 1, f"the same weights have validation losses {seen}")
