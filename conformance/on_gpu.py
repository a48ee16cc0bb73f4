"""Proofs that run the tiny model on a GPU: what it computes there, how it goes on, and where the host waits for it.

Without one there is nothing to prove.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from conformance.case import Case
from conformance.proof import NotProvable, proof, require
from conformance.runs import Run
from conformance.training import KILLED, RUNNABLE, bitwise, fit, furthest, go_on, run_with, run_without

NEAR = 1e-4
"""Relative difference of losses and norms after 8 steps: exp, tanh and rsqrt of a GPU differ by some 2^-23 each."""

ON_A_GPU = tuple(kind for kind in RUNNABLE if kind not in ("data", "loggers"))
"""Kinds whose techniques touch the device; texts are prepared before a run."""


@proof(*ON_A_GPU, gpu=True)
def agrees_on_a_gpu(case: Case) -> None:
    """On a GPU it computes what it does on a CPU."""
    found, expected = _on_a_gpu(case).succeeded("on a GPU, `fit`"), run_with(case)
    if expected.record["random"]:
        raise NotProvable("its training draws random numbers (dropout?), which a GPU has of its own")
    tolerance = max(NEAR, case.tolerance)
    apart, where = furthest(found, expected)
    require(apart <= tolerance, f"{where} on a GPU and on the CPU (tolerance {tolerance:g})")


@proof(*ON_A_GPU, gpu=True)
def resumes_bitwise_on_a_gpu(case: Case) -> None:
    """A run on a GPU that is cut off as by SIGKILL and resumed is bitwise the whole run, with `deterministic: warn`."""
    expected = _on_a_gpu(case).succeeded("on a GPU, `fit`")
    bitwise(
        case,
        go_on(case, expected, "gpu", *_words(case.values)).succeeded("on a GPU, the resumed run"),
        expected,
    )


@proof(*ON_A_GPU, gpu=True)
def idle_costs_nothing_on_a_gpu(case: Case) -> None:
    """Steps that are not logged make the host wait for the GPU no more often than without it."""
    if reason := case.exempt.get("idle_costs_nothing"):
        raise NotProvable(f"exempt on a CPU: {reason}")
    waits = _on_a_gpu(case).succeeded("on a GPU, `fit`").record["waits"]
    usual = len(run_without(case, *_words(case.plain_values)).record["waits"]) if waits else 0
    places = "\n".join(sorted({f"{place} ({waits.count(place)} times)" for place in waits})[:5])
    require(len(waits) <= usual, f"{len(waits)} waits, {usual} without it; they came from\n{places}")


@cache
def _on_a_gpu(case: Case) -> Run:
    import torch

    there = torch.cuda.device_count()
    if there < case.ranks:
        raise NotProvable(f"it needs {case.ranks} GPU{'s' * (case.ranks > 1)}: {there or 'none'} here")
    return fit(case, "gpu", *_words(case.values), ranks=case.ranks, copy_at=KILLED)


def _words(values: Mapping[str, Any]) -> tuple[str, ...]:
    """On a GPU, where kernels add in the same order twice if they can."""
    given = values["trainer"].get("deterministic", "warn")
    return ("--trainer.accelerator=gpu", f"--trainer.deterministic={str(given).lower()}")
