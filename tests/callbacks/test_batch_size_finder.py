"""The search finds the largest divisor that fits, under a limit that allocations really meet."""

import pytest
import torch

from callbacks.batch_size_finder import BatchSizeFinder, divisors, largest, widened
from core.errors import ConfigError
from tests.support.token_runs import (
    NEEDS_DROPPED_STEPS,
    callback,
    ended_alike,
    fit,
    state_of,
    strategy,
    taught,
)

MODEL = {"model": {"network": {"init_args": {"n_embd": 64, "max_sequence_length": 128}},
                   "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 2}}}}  # fmt: skip
LIMIT = 100_000_000
"""Bytes: 12 rows need 120 million and what the CPU's kernels take, 6 rows half of both, at most 82 million."""

ENDLESS = 2_000_000_000


def shape(batch_size, accumulated, **data):
    return {"trainer": {"accumulate_grad_batches": accumulated, "max_steps": 3, "val_check_interval": 1},
            "data": {"init_args": {"batch_size": batch_size, "sequence_length": 96, **data}}}  # fmt: skip


def finder(limit=LIMIT):
    counted = {"class_path": "tests.support.limits.Counted"}
    both = [counted, *callback("BatchSizeFinder", memory_limit=limit)["trainer"]["callbacks"]]
    return {"trainer": {"callbacks": both}}


@pytest.mark.parametrize(("limit", "rows"), [(LIMIT, 6), pytest.param(ENDLESS, 12, marks=pytest.mark.slow)])
def test_the_run_after_it_is_the_run_with_these_numbers(limit, rows):
    found = fit(MODEL, shape(2, 6), finder(limit))
    assert state_of(found, "BatchSizeFinder") == {"batch_size": rows}
    ended_alike(found, fit(MODEL, shape(rows, 12 // rows)))
    assert f"{rows} rows fit" in found.error_text


@pytest.mark.ci
def test_epochs_and_schedules_are_those_of_these_numbers():
    # 83 rows are 7 steps of 6 + 6 rows with a rest, or one of 12 rows without
    epochs = {"trainer": {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 1.0, "val_check_interval": 1.0,
                          "check_val_every_n_epoch": 1}}  # fmt: skip
    found = fit(MODEL, shape(6, 2), epochs, finder(ENDLESS))
    ended_alike(found, fit(MODEL, shape(12, 1), epochs))


@pytest.mark.ci
def test_a_resumed_run_goes_on_with_them():
    usual = (MODEL, shape(2, 6), finder())
    longer = {"trainer": {"max_steps": 6, "val_check_interval": 9}}
    whole = fit(*usual, longer)
    fit(*usual, longer, code=-9, kill_at=5, name="batch-size-finder-killed")
    found = fit(*usual, longer, words=("--ckpt_path=last",), name="batch-size-finder-killed")
    ended_alike(found, whole)
    assert "BatchSizeFinder:" not in found.error_text  # it does not search again


@pytest.mark.ci
def test_a_try_that_left_half_of_a_weights_state_is_no_trouble_to_the_next():
    """4 rows do not fit, in the fourth step: the second of AdamW's two averages. Then 3 rows are tried, and do."""
    half = {"trainer": {"callbacks": [{"class_path": "tests.support.limits.HalfState", "init_args": {"step": 4}},
                                      *finder(ENDLESS)["trainer"]["callbacks"][1:]]}}  # fmt: skip
    adamw = {"model": {"optimizer": {"class_path": "AdamW"}}}
    found = fit(MODEL, adamw, shape(2, 6), half)
    assert state_of(found, "BatchSizeFinder") == {"batch_size": 3}
    ended_alike(found, fit(MODEL, adamw, shape(3, 4)))


TENSOR = strategy("HybridParallel", data_shard=1, tensor=2)
ULYSSES = strategy("HybridParallel", data_shard=1, context=2, context_method="ulysses")


@pytest.mark.ci
@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(strategy("DDP"), marks=pytest.mark.slow),
        pytest.param(strategy("FSDP"), marks=NEEDS_DROPPED_STEPS),
        pytest.param(strategy("DeepSpeedZero", stage=1), marks=pytest.mark.slow),
        strategy("DeepSpeedZero", stage=2),
        pytest.param(TENSOR, marks=[pytest.mark.slow, NEEDS_DROPPED_STEPS]),
        pytest.param(ULYSSES, marks=[pytest.mark.slow, NEEDS_DROPPED_STEPS]),
    ],
    ids=["DDP", "FSDP", "stage1", "stage2", "tensor", "ulysses"],
)
def test_all_ranks_take_what_fits_on_each(spread):
    """Under FSDP a try breaks off in the middle of forward on one rank alone, and the run after it is bitwise the same."""
    parts = MODEL, spread, shape(2, 6)
    # with DTensors the first step takes up to 70 million bytes: modules, caches
    size = {"limit": LIMIT} if spread == strategy("DDP") else {"limit": 4 * LIMIT, "row": 40_000_000}
    on_one = {"class_path": "tests.support.limits.Less", "init_args": {"rank": 1, **size}}
    both = {
        "trainer": {
            "callbacks": [on_one, *callback("BatchSizeFinder", memory_limit=ENDLESS)["trainer"]["callbacks"]]
        }
    }
    found = fit(*parts, both, ranks=2)
    assert state_of(found, "BatchSizeFinder") == {"batch_size": 6}
    ended_alike(found, fit(MODEL, spread, shape(6, 2), ranks=2))


@NEEDS_DROPPED_STEPS
@pytest.mark.ci
def test_a_sharded_teacher_is_gathered_anew_after_the_trials():
    """Of which each gathers what this rank has, in place of what the others have."""
    parts = MODEL, strategy("FSDP"), taught()
    found = fit(*parts, shape(2, 6), callback("BatchSizeFinder", memory_limit=ENDLESS), ranks=2)
    assert state_of(found, "BatchSizeFinder") == {"batch_size": 12}
    ended_alike(found, fit(*parts, shape(12, 1), ranks=2))


def test_a_row_that_does_not_fit_ends_the_run():
    done = fit(MODEL, shape(2, 6), finder(500_000), code=2)
    assert "no room for a step on a single row of 96 tokens" in done.error_text
    assert len(done.error_text.splitlines()) <= 10


@pytest.mark.parametrize("number", [1, 7, 12, 64, 90])
def test_the_search_finds_the_largest_divisor_that_fits(number):
    sizes = divisors(number)
    assert sizes == [each for each in range(1, number + 1) if number // each * each == number]
    for most in range(number + 2):
        tried = []
        expected = max((size for size in sizes if size <= most), default=None)
        assert (
            largest(sizes, lambda size, most=most, tried=tried: tried.append(size) or size <= most)
            == expected
        )
        assert len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([finder(None)], "memory_limit is needed on a CPU"),
        ([finder(0)], "a memory_limit from 1 byte upwards"),
        ([finder(), strategy("HybridParallel", pipeline=2)], "set --trainer.strategy.pipeline=1"),
        ([finder(), strategy("HybridParallel", context=2)], "context_method=ulysses"),
        ([finder(), strategy("DDP", static_graph=True)], "static_graph=false"),
        ([finder(), {"data": {"class_path": "tests.support.toy.ToyData", "init_args": {}}}], "which ToyData does not record"),
    ],
)  # fmt: skip
def test_mistakes_in_a_run(parts, said):
    done = fit(*parts, code=2)
    assert said in done.error_text
    assert len(done.error_text.splitlines()) <= 10


def test_two_owners_of_the_batch_are_refused():
    both = {"trainer": {"callbacks": [{"class_path": "BatchSizeRamp"}, *finder()["trainer"]["callbacks"]]}}
    assert "would both control the batch size" in fit(both, code=2).error_text


def test_rows_of_a_decoder_grow_with_those_of_the_encoder():
    batch = {"input_ids": torch.arange(8)[None], "decoder_input_ids": torch.arange(4)[None]}
    found = widened(batch, 12)
    assert found["input_ids"].tolist() == [[*range(8), *range(4)]]
    assert found["decoder_input_ids"].tolist() == [[*range(4), 0, 1]]


def test_the_limit_is_in_bytes():
    with pytest.raises(ConfigError, match="from 1 byte upwards"):
        BatchSizeFinder(-1)


@pytest.mark.gpu
def test_on_a_gpu_it_takes_what_fits():
    """Of 64 rows of about 7 MB each, with 320 MiB."""
    big = {"model": {"network": {"init_args": {"n_embd": 512, "max_sequence_length": 128}}}}
    limit = {"class_path": "tests.support.limits.OneGPU", "init_args": {"mib": 320, "step": None}}
    both = {"trainer": {"callbacks": [limit, *callback("BatchSizeFinder")["trainer"]["callbacks"]]}}
    found = fit(big, shape(8, 8), both, words=("--trainer.accelerator=gpu",))
    assert state_of(found, "BatchSizeFinder")["batch_size"] in (16, 32)
