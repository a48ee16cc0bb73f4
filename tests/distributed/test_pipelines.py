"""What a step of a pipeline takes: schedules, messages, gathers and reductions; and steps with a loss scale."""

import json
import math
import re
from collections import Counter

import pytest

from conformance.workshop import workshop
from tests.support.combinations import pipeline
from tests.support.same_run import (
    CONFIG,
    FOUR_BLOCKS,
    TOLERANCE,
    differences,
    fit,
    one_process,
    weights_apart,
)

BATCHES, VALIDATED = CONFIG["trainer"]["accumulate_grad_batches"], CONFIG["trainer"]["limit_val_batches"]


def counted(sizes, name):
    """Returns a run of four ranks, and what each noted of its second step and second validation."""
    folder = workshop() / name
    counting = {
        "class_path": "tests.support.counted_steps.CountedSteps",
        "init_args": {"folder": str(folder)},
    }
    strategy = {"class_path": "HybridParallel", "init_args": sizes}
    done = fit({"trainer": {"callbacks": [counting], "strategy": strategy}} | FOUR_BLOCKS, 4, name=name)
    assert done.code == 0, done.error_text
    return done, [json.loads((folder / f"counted.{rank}.json").read_text()) for rank in range(4)]


LAYOUTS = [
    # of this rank: boundaries to send to, to receive from; gathered groups of weights
    pytest.param(pipeline("1F1B", 2, data_replicate=2), [(1, 0, 0), (0, 1, 0)], id="replicated"),
    pytest.param(pipeline("InterleavedZeroBubble", 4), [(2, 1, 3), (1, 2, 3)], id="sharded"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("sizes", "expected"), LAYOUTS)
def test_a_step_is_one_schedule_without_talk_of_shapes_and_reduces_gradients_once(sizes, expected):
    done, ranks = counted(sizes, f"counted-{sizes['schedule']}")
    apart = differences(done, one_process(FOUR_BLOCKS))
    assert max(apart.values()) <= TOLERANCE, apart
    number = BATCHES * sizes["microbatches"]
    for rank, found in enumerate(ranks):
        ahead, behind, groups = expected[rank // 2]
        assert found["schedules"] == [number]
        assert max(found["buffers"]) < number  # of micro-batches under way
        step, validation = (Counter(name for name, _ in found[of]) for of in ("step", "validation"))
        assert (
            step["send"] == step["recv"] == (ahead + behind) * number
        )  # hidden states, and their gradients back
        assert step["all_gather"] == step["reduce_scatter"] == groups
        assert step["broadcast"] == 1  # of the loss, by the last stage
        sums = [size for name, size in found["step"] if name == "all_reduce" and size > 24]
        # the tied weights; and, where they are not sharded, all gradients
        assert len(sums) == (1 if groups else 2)
        assert validation["send"] == ahead * VALIDATED * sizes["microbatches"]
        assert validation["recv"] == behind * VALIDATED * sizes["microbatches"]
        assert validation["broadcast"] == VALIDATED


def at_pipeline(**more):
    return {"strategy": {"class_path": "HybridParallel", "init_args": {"pipeline": 2} | more}}


@pytest.mark.ci
def test_a_loss_scale_acts_in_the_last_stage_and_an_overflow_skips_the_step_of_all():
    # gradients of the first steps overflow fp16; the others are those of one process, up to its rounding (5e-4)
    scale = {"class_path": "FP16Mixed", "init_args": {"init_scale": 2.0**28}}
    trainer = {"plugins": [{"class_path": "AtomicCheckpoint"}, scale]}
    found, expected = fit({"trainer": trainer | at_pipeline()}, 2), one_process({"trainer": trainer})
    assert found.code == 0, found.error_text
    scales = [run.checkpoint()["FP16Mixed"]["scale"] for run in (found, expected)]
    assert scales[0] == scales[1] < 2.0**28
    one, other = found.record["figures"], expected.record["figures"]
    for step, figures in other.items():
        assert one[step]["train/loss"] == pytest.approx(figures["train/loss"], rel=1e-4)
        assert one[step]["train/grad_norm"] == pytest.approx(
            figures["train/grad_norm"], rel=1e-3, nan_ok=True
        )
    assert math.isnan(one["1"]["train/grad_norm"])
    assert one["4"]["train/grad_norm"] > 0
    assert weights_apart(found, expected) < 1e-2


@pytest.mark.ci
def test_batches_of_a_step_with_other_lengths_go_through_schedules_of_their_own():
    lengths = {"data": {"init_args": {"lengths": [16, 12, 12, 16, 16]}}}
    apart = differences(fit({"trainer": at_pipeline()} | lengths, 2), one_process(lengths))
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.ci
def test_a_step_that_is_not_finite_is_repeated_through_the_stages_and_named():
    trainer = {"callbacks": [{"class_path": "NonFiniteGuard"}]}
    model = {"optimizer": {"init_args": {"lr": 1e30}}}
    found, expected = (
        fit({"trainer": trainer | more, "model": model}, ranks)
        for more, ranks in ((at_pipeline(), 2), ({}, 1))
    )
    told = [
        re.search(r"NonFiniteGuard: in step .*?First found: [^(\n]*", run.error_text)
        for run in (found, expected)
    ]
    assert found.code == expected.code == 2, found.error_text
    assert told[0].group().strip(" .") == told[1].group().strip(" .")
