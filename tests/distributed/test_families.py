"""Each family of networks trains on ranks as in one process, under every strategy."""

from functools import cache

import pytest

from conformance import cases
from conformance.training import furthest, on_ranks, run_fit
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

STEPS = 2
"""An update by gradients of all ranks, and losses and gradients behind it. More steps repeat that."""

TOLERANCE = 1e-5
"""Of losses and gradient norms over these steps."""

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


def blocks_of(name):
    """Returns what FSDP, ZeRO and pipelines see of a family: the class that says what its blocks are, and whether they have experts."""
    target = FAMILIES[name].target
    return next(base for base in target.__mro__ if "blocks" in vars(base)), hasattr(target, "expert_stacks")


FIRST = {blocks_of(name): name for name in reversed(FAMILIES)}
"""The first family of each kind of blocks."""


PLANNED_ALIKE = {"Mistral", "Mixtral", "OLMo2", "OLMoE", "Qwen2", "Qwen3", "Qwen3MoE"}
"""Families whose plan is the one of Decoder or SparseDecoder, as Llama and DeepSeekV3 take it."""


def is_needed(name, strategy):
    """Returns whether a family's own code takes part in a strategy, so that another family's run does not hold for it.

    Its plan does under `sequence`, which takes that of `tensor` too. That its stages compute what forward does, the kit
    proves bit by bit; how stages exchange what they compute is the same for all with the same `blocks`. DeepSpeedZero
    shards weights whatever computes with them; those of transformers alone begin in another way.
    """
    if strategy == "tensor":
        return (name, "sequence") in REFUSED
    if strategy == "zero":
        return name == "Pretrained"
    if strategy == "sequence":
        return name not in PLANNED_ALIKE
    return FIRST[blocks_of(name)] == name


def test_families_that_are_planned_alike_have_no_plan_of_their_own():
    own = ("sequence_parallel_plan", "tensor_parallel_plan")
    for name in PLANNED_ALIKE:
        assert not any(method in vars(FAMILIES[name].target) for method in own), name


def runs():
    """Yields each family and strategy."""
    for name in FAMILIES:
        for strategy in STRATEGIES:
            mark = pytest.mark.ci if is_needed(name, strategy) else pytest.mark.slow
            yield pytest.param(name, strategy, marks=mark)


def train(name, label, *words, ranks=1):
    """Trains a family for a few steps."""
    values = on_ranks(FAMILIES[name].values, ranks)
    steps = [f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0"]
    return run_fit(values, f"{name}-{label}", *steps, *words, ranks=ranks, keep=False)


@cache
def alone(name):
    """Returns a family's run in one process."""
    return train(name, "alone").succeeded("in one process, `fit`")


@pytest.mark.parametrize(("name", "strategy"), list(runs()))
def test_trains_as_one_process(name, strategy):
    rows = FAMILIES[name].values["data"]["init_args"]["batch_size"]
    rows = rows if strategy in WHOLE_BATCH else rows // 2
    found = train(name, strategy, f"--data.batch_size={rows}", *STRATEGIES[strategy], ranks=2)
    if reason := REFUSED.get((name, strategy)):
        assert found.code == 2
        assert reason in found.error_text
        return
    assert found.code == 0, found.error_text
    expected = alone(name)
    assert [*expected.record["figures"]] == [str(step) for step in range(1, STEPS + 1)]
    apart, where = furthest(found, expected)
    assert apart <= TOLERANCE, where
