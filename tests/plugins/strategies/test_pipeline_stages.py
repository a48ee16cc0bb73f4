"""Which micro-batches a schedule takes at once, and how long its ranks are idle."""

import pytest

from plugins.strategies.pipeline_stages import Layout
from tests.benchmarks.pipeline_bubble import idle_share


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (16, 64), (16, 192)])
def test_a_rank_is_idle_while_the_others_have_their_first_and_last_micro_batches(ranks, microbatches):
    alone = (ranks - 1) / (microbatches + ranks - 1)
    assert idle_share("1F1B", ranks, microbatches) == pytest.approx(alone)


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_one_schedule_for_all_batches_of_a_step_is_idle_less(schedule):
    assert Layout(schedule, 4, 8).takes(4 * 8)
    assert idle_share(schedule, 4, 4 * 8) < 0.4 * idle_share(schedule, 4, 8)


def test_what_cannot_go_through_one_schedule_does_not():
    assert not Layout("GPipe", 4, 4).takes(8)  # it keeps the activations of all micro-batches
    assert Layout("Interleaved1F1B", 4, 8).takes(2 * 6)
    assert not Layout("Interleaved1F1B", 4, 8).takes(3 * 6)  # four rounds
