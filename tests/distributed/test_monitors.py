"""Figures of monitors on ranks are those of one process, however weights, tokens and blocks are distributed."""

import pytest

from tests.support.combinations import DOCUMENTS, LLAMA
from tests.support.same_run import FOUR_BLOCKS, STEPS, fit

EVERY = 2
MONITORS = [
    {"class_path": "WeightMonitor", "init_args": {"every_n_steps": EVERY, "detail": True}},
    {"class_path": "ActivationMonitor", "init_args": {"every_n_steps": EVERY, "saturation": 1.0}},
    {"class_path": "AttentionMonitor", "init_args": {"every_n_steps": EVERY, "queries": 4}},
    {"class_path": "LossBreakdown", "init_args": {"every_n_steps": EVERY, "first_bin": 4}},
    {"class_path": "GradientNoiseScale", "init_args": {"every_n_steps": EVERY, "average": 0.5}},
]
PREFIXES = (
    "gradient_norm/",
    "weight_norm/",
    "update_norm/",
    "update_ratio/",
    "activation/",
    "attention/",
    "logits/",
    "loss/",
    "val/loss/",
)
UNTIED = LLAMA["model"]
TIED = {"network": {"init_args": {"n_layer": 2}}}


def trained(model, ranks=1, accumulate=2, data=None, **strategy):
    trainer = {"callbacks": MONITORS, "accumulate_grad_batches": accumulate}
    if strategy:
        trainer["strategy"] = {"class_path": strategy.pop("kind", "HybridParallel"), "init_args": strategy}
    done = fit({"model": model, "trainer": trainer, **(data or {})}, ranks)
    assert done.code == 0, done.error_text
    return done


def figures(done):
    logged = done.figures["metrics"]
    return {
        (step, name): value
        for step, values in logged.items()
        for name, value in values.items()
        if name.startswith(PREFIXES) and int(step) % EVERY == 0
    }


LAYOUTS = [
    pytest.param(UNTIED, {"kind": "FSDP"}, id="FSDP", marks=pytest.mark.ci),
    pytest.param(UNTIED, {"kind": "DDP"}, id="DDP", marks=pytest.mark.slow),
    pytest.param(UNTIED, {"tensor": 2, "sequence": 2}, id="tensor and sequence", marks=pytest.mark.ci),
    pytest.param(
        TIED,
        {"kind": "DeepSpeedZero", "stage": 3, "persistence_threshold": 0},
        id="ZeRO-3",
        marks=pytest.mark.ci,
    ),
    pytest.param(TIED, {"pipeline": 2}, id="pipeline with tied embeddings"),
    pytest.param(UNTIED, {"context": 2}, id="ring", marks=pytest.mark.ci),
    pytest.param(TIED, {"context": 2, "context_method": "ulysses"}, id="ulysses", marks=pytest.mark.slow),
]


def assert_same_noise(found, expected):
    """Compares two runs with the same parts of steps: the sums of both estimates, as |G|^2 alone is a small difference."""
    one, other = (run.checkpoint()["callbacks"]["GradientNoiseScale"] for run in (found, expected))
    assert one["measurements"] == other["measurements"] == STEPS // EVERY
    assert one["batch"] == other["batch"]
    # both come from squared norms of float32 gradients, which are sums in another order
    scale = other["noise"] / other["batch"]
    assert one["noise"] == pytest.approx(other["noise"], rel=1e-5)
    assert one["signal"] == pytest.approx(other["signal"], abs=1e-5 * scale)


@pytest.mark.parametrize(("model", "strategy"), LAYOUTS)
def test_figures_are_those_of_one_process(model, strategy):
    data = DOCUMENTS if "context" in strategy else None
    done, alone = trained(model, ranks=2, data=data, **strategy), trained(model, data=data)
    found, expected = figures(done), figures(alone)
    if "pipeline" in strategy:
        assert_same_noise(done, alone)
    assert found.keys() == expected.keys()
    assert len(expected) > 20 * STEPS // EVERY
    for key, value in expected.items():
        # float32 sums in another order, over a few steps; an update is a difference of weights, rounded to theirs
        assert found[key] == pytest.approx(value, rel=1e-3 if "update" in key[1] else 2e-5), key


@pytest.mark.parametrize(
    ("ranks", "accumulate", "strategy"),
    [
        pytest.param(2, 1, {"pipeline": 2, "microbatches": 4}, id="halves", marks=pytest.mark.ci),
        pytest.param(4, 2, {"pipeline": 2, "data_shard": 2}, id="sharded data", marks=pytest.mark.slow),
        pytest.param(4, 2, {"pipeline": 2, "data_replicate": 2, "data_shard": 1}, id="replicas", marks=pytest.mark.slow),
        pytest.param(2, 2, {"pipeline": 2, "schedule": "DualPipeV", "microbatches": 4}, id="V", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_noise_that_a_pipeline_measures_is_that_of_one_process(ranks, accumulate, strategy):
    model = FOUR_BLOCKS["model"] if "schedule" in strategy else TIED
    done = trained(model, ranks, accumulate, **strategy)
    assert_same_noise(done, trained(model, accumulate=accumulate))
