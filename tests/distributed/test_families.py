"""Each family of networks trains on ranks as in one process, under every strategy."""

import pytest

from conformance import cases
from conformance.training import fit, furthest, run_with
from tests.conformance.conftest import pytest_leyden_cases

FAMILIES = {
    case.entry.name: case
    for case in cases("leyden", pytest_leyden_cases())
    if case.entry.kind == "networks" and case.entry.name != "GPT"
}

STRATEGIES = {
    "fsdp": ["--trainer.strategy=FSDP"],
    "tensor": ["--trainer.strategy=HybridParallel", "--trainer.strategy.tensor=2"],
    "sequence": [
        "--trainer.strategy=HybridParallel",
        "--trainer.strategy.tensor=2",
        "--trainer.strategy.sequence=2",
    ],
    "pipeline": [
        "--trainer.strategy=HybridParallel",
        "--trainer.strategy.pipeline=2",
        "--trainer.strategy.microbatches=2",
    ],
    "zero": ["--trainer.strategy=DeepSpeedZero", "--trainer.strategy.stage=3"],
}
WHOLE_BATCH = ("tensor", "sequence", "pipeline")
"""Both ranks read the same rows."""

TOLERANCE = 1e-5
"""Of losses and gradient norms over 8 steps: 4.7e-6 is the most seen, which was 3.6e-7 after 4 steps. Rounding grows."""

ASKED = ("blocks", "ends", "tensor_parallel_plan", "sequence_parallel_plan")
"""What strategies ask of a network."""

REFUSED = {
    ("Mamba2", "sequence"): "Mamba2 has no",
    ("Mamba2", "tensor"): "Mamba2 has no",
    ("Pretrained", "pipeline"): "Pretrained does not define where it can be split into stages",
    ("Pretrained", "sequence"): "Pretrained has no sequence-parallel plan",
    ("Pretrained", "tensor"): "Pretrained has no tensor-parallel plan",
    ("T5", "pipeline"): "T5 does not define where it can be split into stages",
    ("T5", "sequence"): "T5 has no sequence-parallel plan",
}
"""Network and strategy that lack a plan -> what says so."""


OF_EACH = ("sequence", "pipeline")
"""Strategies that each family is trained under: they take its plan, that of tensor too, and cut it into stages. The others
treat alike what has the same parts."""


def parts(case):
    """Returns the classes that answer what strategies ask."""
    return tuple(next((base for base in case.target.__mro__ if name in vars(base)), None) for name in ASKED)


FIRST = {parts(case): name for name, case in reversed(FAMILIES.items())}
"""The answering classes -> the first family that has them, which is trained under every strategy."""


def runs():
    """Yields each family and strategy; CI's where a family's own code takes part."""
    for name, case in FAMILIES.items():
        for strategy in STRATEGIES:
            needed = strategy in OF_EACH or FIRST[parts(case)] == name
            yield pytest.param(name, strategy, marks=pytest.mark.ci if needed else pytest.mark.slow)


@pytest.mark.parametrize(("name", "strategy"), list(runs()))
def test_trains_as_one_process(name, strategy):
    case = FAMILIES[name]
    words = list(STRATEGIES[strategy])
    rows = case.values["data"]["init_args"]["batch_size"]
    words.append(f"--data.batch_size={rows if strategy in WHOLE_BATCH else rows // 2}")
    found = fit(case, strategy, *words, ranks=2)
    if reason := REFUSED.get((name, strategy)):
        assert found.code == 2
        assert reason in found.error_text
        return
    assert found.code == 0, found.error_text
    apart, where = furthest(found, run_with(case))
    assert apart <= TOLERANCE, where
