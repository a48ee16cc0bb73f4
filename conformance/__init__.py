"""The conformance kit: proves of a technique what leyden promises of all techniques.

For a package `acme` that registers techniques, in its folder or any other:

    pytest --leyden-package acme                          # a test for each technique and each promise
    pytest --leyden-package acme -k "SpikeGuard and resumes"
    python -m core plugins check acme                     # only what needs no run, without pytest

Put `addopts = "--leyden-package acme"` under `[tool.pytest.ini_options]` and plain `pytest` runs the kit too.

A technique is tried with the arguments of its docstring's `Example:`, laid over `conformance/tiny.yaml`: a GPT
of one layer, 8 optimizer steps on the CPU. Where the example's sizes are too large for a test, or an argument
needs a file, the package's `conftest.py` says which arguments to take instead:

    from conformance import Case

    def pytest_leyden_cases():
        return [
            Case("SpikeGuard", {"window": 3}),
            Case("BigNet", {"n_layer": 2, "n_embd": 32}),
            Case("CsvDocuments", config={"data": {"init_args": {"source": str(HERE / "two.csv")}}}),
            Case("LocalSGD", exempt={"agrees_on_two_ranks": "ranks average every 8 steps only"}),
        ]

The cases of a technique take the place of its example. In a test of your own:

    from conformance import prove, proofs

    def test_spike_guard_keeps_its_promises():
        prove("SpikeGuard", window=3)                     # all proofs; raises AssertionError

    @pytest.mark.parametrize("proof", proofs("callbacks"), ids=str)
    def test_each_promise(proof):
        proof(Case("SpikeGuard", {"window": 3}))

Runs are real: `python -m core fit` in processes of their own, one from the files that a SIGKILL would have left, two
joined by gloo, one with twice the micro-batches. They take about half a second each, because they are forked from one process that has imported
torch, and the proofs of a case share them. What a technique logs and saves of its own is compared between them, but for
figures whose names end in a unit of time, memory or energy (`_ms`, `_gib`, `_per_second`), and what differs between two
runs of the same.

Three proofs are of a GPU: runs there compute what they do on a CPU, resume bitwise, and wait for it in no step that is not logged. They
carry the mark `gpu` (`pytest -m gpu`); without a GPU they are skipped.

The names below are public. `KIT_VERSION` rises by one where a technique that passed may fail: a new proof, or a
stricter one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.case import Case, cases
    from conformance.proof import NotProvable, Proof, proofs, prove

KIT_VERSION = 7

__all__ = ["KIT_VERSION", "Case", "NotProvable", "Proof", "cases", "proofs", "prove"]


def __getattr__(name: str) -> Any:
    # On first use: every pytest of an environment with leyden imports this package for its plugin.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "case" if name in ("Case", "cases") else "proof"
    return getattr(import_module(f"conformance.{home}"), name)
