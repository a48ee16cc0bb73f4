"""Proofs for strategies, precisions and data modules."""

from __future__ import annotations

import math

from torch.nn.functional import scaled_dot_product_attention

from conformance.case import Case
from conformance.networks import build
from conformance.proof import NotProvable, proof, require
from conformance.training import STEPS, fit, furthest, run_with, run_without
from toolkit.positions import explain_position_mixing

NEARNESS = 0.02
"""Relative: fp8 keeps 3 bits of mantissa, 2^-4, of each factor, which sums over a row average out."""


@proof("strategies")
def computes_what_one_device_does(case: Case) -> None:
    """On the processes that it needs it computes what one process does without it."""
    apart, where = furthest(run_with(case), run_without(case))
    require(apart <= case.tolerance, f"{where} with it and without (tolerance {case.tolerance:g})")


@proof("networks")
def can_be_cut_along_its_tokens(case: Case) -> None:
    """Where `replace_attention` returns True, each half of a sequence on a rank of its own gives one process's losses."""
    network = build(case)
    reason = (
        explain_position_mixing(network) if network.replace_attention(scaled_dot_product_attention) else ""
    )
    if reason is not None:
        require(not reason, f"replace_attention returns True, but {reason}")
        raise NotProvable("its attention cannot be replaced")
    expected = run_with(case)
    if expected.record["random"]:
        raise NotProvable("its training draws random numbers (dropout?), each rank its own")
    words = ["--trainer.strategy=HybridParallel", "--trainer.strategy.context=2"]
    if rows := case.values["data"].get("init_args", {}).get("batch_size"):
        words.append(f"--data.batch_size={rows}")  # both ranks read the same ones
    found = fit(case, "context", *words, ranks=2).succeeded("with context 2, the run")
    apart, where = furthest(found, expected)
    require(
        apart <= case.tolerance, f"{where} with context 2 and in one process (tolerance {case.tolerance:g})"
    )


@proof("precision")
def stays_near_float32(case: Case) -> None:
    """The losses of the tiny run are within 2% of float32's, and fall as they do."""
    found, expected = (done.record["losses"] for done in (run_with(case), run_without(case)))
    for number, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        require(
            math.isclose(one, other, rel_tol=NEARNESS),
            f"loss {one:.4f} in step {number}, {other:.4f} in float32",
        )


@proof("datamodules")
def gives_other_rows_in_each_step(case: Case) -> None:
    """Batches are mappings with `input_ids` and `labels`, and no two steps of an epoch get the same."""
    inputs = run_with(case).record["inputs"]
    first = inputs[: min(STEPS, 5)]
    same = [(a + 1, b + 1) for b in range(len(first)) for a in range(b) if first[a] == first[b]]
    require(not same, f"steps {same and same[0]} are given the same rows")


@proof("datamodules")
def validation_is_the_same_each_time(case: Case) -> None:
    """Each validation sees the same batches: with weights that do not change, the same loss."""
    frozen = fit(case, "frozen", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.0")
    seen = [f["val/loss"] for f in frozen.succeeded("`fit`").record["figures"].values() if "val/loss" in f]
    require(len(seen) >= 2, f"{len(seen)} validations in {STEPS} steps")
    require(len(set(seen)) == 1, f"the same weights have validation losses {seen}")
