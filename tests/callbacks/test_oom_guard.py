"""A run that would die goes on in smaller parts, loses nothing, and is the run that had them from the start."""

import numpy as np
import pytest
import torch

from callbacks.oom_guard import OOMGuard, split
from conformance.workshop import workshop
from core.errors import ConfigError
from datamodules.preparation.writers.token_shards import TokenShards
from tests.support.same_run import weights_apart
from tests.support.token_runs import (
    NEEDS_DROPPED_STEPS,
    callback,
    ended_alike,
    fit,
    state_of,
    strategy,
    taught,
)

ENDLESS = 2_000_000_000
MODEL = {"model": {"network": {"init_args": {"n_embd": 64, "max_sequence_length": 128}}}}
SQUEEZE = {"limit": 70_000_000, "step": 2}
"""8 rows need 80 million bytes and what the CPU's kernels take; 4 rows half of both, at most 56 million."""


def shape(batch_size, accumulated, **trainer):
    return {"trainer": {"accumulate_grad_batches": accumulated, **trainer},
            "data": {"init_args": {"batch_size": batch_size, "sequence_length": 96}}}  # fmt: skip


def squeezed(guard=True, **options):
    squeeze = {"class_path": "tests.support.limits.Squeeze", "init_args": SQUEEZE | options}
    own = callback("OOMGuard", memory_limit=ENDLESS)["trainer"]["callbacks"]
    return {"trainer": {"callbacks": [squeeze, *(own if guard else [])]}}


def is_the_same_run(found, expected, rounding=1e-5):
    """Asserts that two runs differ by rounding alone, which 6 steps in float32 let grow to 1e-5."""
    assert found.record["steps"] == expected.record["steps"]
    for step, figures in expected.record["figures"].items():
        assert found.record["figures"][step] == pytest.approx(
            figures, rel=rounding
        )  # tokens and rates among them
    assert weights_apart(found, expected) < rounding


def test_a_run_that_would_die_goes_on():
    dead = fit(MODEL, shape(8, 1), squeezed(guard=False), code=1)
    assert "can't allocate memory" in dead.error_text
    found = fit(MODEL, shape(8, 1), squeezed())
    assert state_of(found, "OOMGuard") == {"parts": 2}
    is_the_same_run(found, fit(MODEL, shape(4, 2)))
    assert (
        "out of memory in step 3, on rank 0: micro-batches of 8 rows are computed in parts of 4, not 8"
        in found.error_text
    )


@pytest.mark.parametrize(
    "batch", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_step_is_repeated_whole(batch):
    found = fit(MODEL, shape(8, 3), squeezed(batch=batch))
    assert state_of(found, "OOMGuard") == {"parts": 2}
    is_the_same_run(found, fit(MODEL, shape(4, 6)))


def test_without_a_shortage_it_is_the_run_without_it():
    parts = MODEL, shape(8, 2)
    ended_alike(fit(*parts, callback("OOMGuard", memory_limit=ENDLESS)), fit(*parts))


DROPOUT = {"model": {"network": {"init_args": {"dropout": 0.1}}}}


@pytest.mark.ci
def test_a_resumed_run_goes_on_in_parts():
    usual = MODEL, DROPOUT, shape(8, 2), squeezed(step=1)
    whole = fit(*usual)
    assert state_of(whole, "OOMGuard") == {"parts": 2}
    fit(*usual, code=-9, kill_at=5, name="oom-guard-killed")
    found = fit(*usual, words=("--ckpt_path=last",), name="oom-guard-killed")
    ended_alike(found, whole)
    assert "OOMGuard: out of memory" not in found.error_text


@NEEDS_DROPPED_STEPS
@pytest.mark.ci
@pytest.mark.parametrize(
    ("sharing", "batch", "parts"),
    [
        pytest.param("DDP", 0, 1, marks=pytest.mark.slow),
        ("DDP", 1, 1),
        pytest.param("FSDP", 0, 2, marks=pytest.mark.slow),
        pytest.param("FSDP", 1, 2, marks=pytest.mark.slow),
        ("HybridParallel", 1, 2),
        pytest.param("DeepSpeedZero", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_one_of_two_ranks_runs_out(sharing, batch, parts):
    """Under HybridParallel the one has too little memory for activations, and makes the messages of all rows without."""
    usual = MODEL, strategy(sharing, **({"tensor": 2} if sharing == "HybridParallel" else {})), shape(8, 2)
    found = fit(*usual, squeezed(step=1, rank=1, batch=batch, pieces=8), ranks=2)
    assert "out of memory in step 2, on rank 1" in found.error_text
    assert state_of(found, "OOMGuard") == {"parts": parts}  # rank 0's
    is_the_same_run(found, fit(*usual, ranks=2))


ULYSSES = strategy("HybridParallel", context=2, context_method="ulysses")


def same_steps(steps, ranks):
    """Returns the overlay of steps that all have the same batches, and change nothing."""
    folder = workshop() / f"{steps} same steps of {ranks} ranks"
    step = np.random.default_rng(0).integers(0, 64, ranks * 2 * 4 * 12)  # two micro-batches of 4 rows
    for part, times in (("train", steps + 1), ("validation", 1)):
        TokenShards(1 << 20).write([np.tile(step, times)], folder / part, vocab_size=64)
    return {
        "trainer": {"max_steps": steps, "accumulate_grad_batches": 2, "limit_val_batches": 0},
        "model": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}},
        "data": {"init_args": {"folder": str(folder), "shuffle": False}},
    }


@NEEDS_DROPPED_STEPS
@pytest.mark.parametrize(
    ("sharding", "steps", "ranks", "readers"),
    [
        pytest.param(strategy("FSDP", stage=2), 20, 2, 2, marks=pytest.mark.ci),
        pytest.param(strategy("FSDP", stage=3), 152, 2, 2, marks=pytest.mark.slow),
        pytest.param(strategy("FSDP", stage=2), 152, 2, 2, marks=pytest.mark.slow),
        pytest.param(strategy("FSDP", replicas=2, reduce_format="bf16"), 62, 4, 4, marks=pytest.mark.slow),
        pytest.param(strategy("HybridParallel", data_shard=2), 62, 2, 2, marks=pytest.mark.slow),
        pytest.param(strategy("HybridParallel", tensor=2), 20, 2, 1, marks=pytest.mark.ci),
        pytest.param(strategy("HybridParallel", tensor=2), 152, 2, 1, marks=pytest.mark.slow),
        pytest.param(strategy("HybridParallel", tensor=2, sequence=2), 62, 4, 2, marks=pytest.mark.slow),
        pytest.param(ULYSSES, 62, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_weights_repeat_a_step_wherever_one_fails(sharding, steps, ranks, readers):
    """In forward or backward, in either micro-batch, on one rank or two: gradients are those of a step in parts, bit by bit."""
    fail_anywhere(sharding, steps, ranks, readers)


@NEEDS_DROPPED_STEPS
@pytest.mark.parametrize(
    ("sharding", "steps", "ranks", "readers"),
    [
        pytest.param(strategy("FSDP", stage=3), 20, 2, 2, marks=pytest.mark.ci),
        pytest.param(strategy("FSDP", stage=2), 152, 2, 2, marks=pytest.mark.slow),
        pytest.param(strategy("FSDP", stage=3), 152, 2, 2, marks=pytest.mark.slow),
        pytest.param(strategy("FSDP", replicas=2), 62, 4, 4, marks=pytest.mark.slow),
        pytest.param(strategy("HybridParallel", tensor=2), 62, 2, 1, marks=pytest.mark.slow),
        pytest.param(strategy("HybridParallel", data_shard=2, tensor=2), 62, 4, 2, marks=pytest.mark.slow),
        pytest.param(strategy("DeepSpeedZero", stage=2), 62, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_fails_in_a_teacher_is_repeated_as_well(sharding, steps, ranks, readers):
    """Its blocks and its head are gathered and freed beside those of the network that is trained."""
    fail_anywhere(sharding | taught(), steps, ranks, readers)


def fail_anywhere(sharding, steps, ranks, readers, **how):
    fails = {
        "class_path": "tests.support.failing.FailsAnywhere",
        "init_args": {"failures": steps * 3 // 4, **how},
    }
    guard = callback("OOMGuard", memory_limit=ENDLESS)["trainer"]["callbacks"]
    fit(sharding, same_steps(steps, readers), {"trainer": {"callbacks": [fails, *guard]}}, ranks=ranks)


@pytest.mark.parametrize(
    ("stage", "precision", "bucket", "steps", "ranks"),
    [
        pytest.param(2, "32-true", 2000, 20, 2, marks=pytest.mark.ci),
        pytest.param(2, "32-true", None, 62, 2, marks=pytest.mark.slow),
        pytest.param(2, "32-true", 500, 62, 4, marks=pytest.mark.slow),
        pytest.param(2, "bf16-mixed", 500, 92, 2, marks=pytest.mark.slow),
        pytest.param(1, "32-true", None, 20, 2, marks=pytest.mark.slow),
        pytest.param(1, "32-true", 2000, 92, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_deepspeed_repeat_a_step_wherever_one_fails(stage, precision, bucket, steps, ranks):
    """Buckets of gradients that were sent before, or are half full, are dropped with the step."""
    sharding = strategy("DeepSpeedZero", stage=stage)
    sharding["trainer"]["precision"] = precision
    fail_anywhere(sharding, steps, ranks, ranks, bucket=bucket)


@NEEDS_DROPPED_STEPS
@pytest.mark.ci
def test_ranks_that_share_weights_end_where_a_row_does_not_fit():
    done = fit(MODEL, strategy("FSDP"), shape(2, 1), squeezed(limit=500_000, rank=1), ranks=2, code=1)
    assert done.codes[1] == 2
    said = (done.folder.parent / "output.1.err").read_text(encoding="utf-8")
    # what the heap still has free decides in which operation: of the row's own, or one that all ranks take part in
    assert (
        "Out of memory on rank 1, also with a single row" in said
        or "Out of memory on rank 1 while it" in said
    )
    assert "Another rank died: rank 1" in done.error_text


def test_a_row_that_does_not_fit_ends_the_run():
    done = fit(MODEL, shape(4, 1), squeezed(limit=500_000), code=2)
    assert "with a single row of 96 tokens" in done.error_text
    assert "in parts of 1, not 2" in done.error_text


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_parts_are_all_rows_in_their_order(parts):
    batch = {"input_ids": torch.arange(24).view(6, 4), "labels": -torch.arange(24).view(6, 4)}
    cut = split(batch, parts)
    assert len(cut) == min(parts, 6)
    for name, values in batch.items():
        assert torch.equal(torch.cat([part[name] for part in cut]), values)
    assert max(len(part["labels"]) for part in cut) == -(-6 // len(cut))


def test_the_limit_is_in_bytes():
    with pytest.raises(ConfigError, match="from 1 byte upwards"):
        OOMGuard(0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([callback("OOMGuard")], "memory_limit is needed on a CPU"),
        ([squeezed(), strategy("HybridParallel", pipeline=2)], "set --trainer.strategy.pipeline=1"),
        ([squeezed(), strategy("HybridParallel", context=2)], "context_method=ulysses"),
        ([squeezed(), strategy("DDP", compression="bf16")], "--trainer.strategy.compression=none"),
        ([squeezed(), strategy("DeepSpeedZero", stage=3)], "set --trainer.strategy.stage=2"),
        ([squeezed(), strategy("DeepSpeedZero", offload_optimizer="cpu")], "offload_optimizer=none"),
        (
            [squeezed(), {"trainer": {"strategy": "ddp_find_unused_parameters_true"}}],
            "averages all gradients",
        ),
    ],
)
def test_mistakes_in_a_run(parts, said):
    done = fit(*parts, code=2)
    assert said in done.error_text
    assert len(done.error_text.splitlines()) <= 10


BIG = {
    "model": {"network": {"init_args": {"n_embd": 512, "max_sequence_length": 1024}}},
    "trainer": {"max_steps": 4},
    "data": {"init_args": {"sequence_length": 96}},
}
"""A row needs about 7 MB for backward."""


@pytest.mark.gpu
def test_a_run_that_would_die_on_a_gpu_goes_on():
    """64 rows need some 450 MB, 32 rows half of it."""
    gpu = ("--trainer.accelerator=gpu",)
    limit = {"class_path": "tests.support.limits.OneGPU", "init_args": {"mib": 320, "step": 2}}
    guard = callback("OOMGuard")["trainer"]["callbacks"]
    dead = fit(BIG, shape(64, 1), {"trainer": {"callbacks": [limit]}}, words=gpu, code=1)
    assert "out of memory" in dead.error_text
    found = fit(BIG, shape(64, 1), {"trainer": {"callbacks": [limit, *guard]}}, words=gpu)
    assert state_of(found, "OOMGuard")["parts"] >= 2
    is_the_same_run(found, fit(BIG, shape(32, 2), words=gpu), rounding=1e-4)  # of kernels for other shapes
