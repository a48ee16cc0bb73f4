"""How much of a step the ranks of a pipeline are idle: counted in torch's schedules, not measured.

python -m tests.benchmarks.pipeline_bubble

A forward of a stage takes one slot of time, its backward two: one for gradients of inputs, one for those of weights. Messages take
none.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from plugins.strategies.pipeline_stages import Layout

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
CASES = [
    ("1F1B", 16, 64, 3),
    ("1F1B", 8, 16, 4),
    ("GPipe", 8, 16, 4),
    ("Interleaved1F1B", 8, 16, 4),
    ("InterleavedZeroBubble", 8, 16, 4),
    ("ZBVZeroBubble", 8, 16, 4),
    ("DualPipeV", 8, 16, 4),
]
"""Schedule, ranks, micro-batches of a batch, batches of a step; the first is that of recipes/gpt3_175b_3d."""


def idle_share(schedule: str, ranks: int, microbatches: int) -> float:
    """Returns the share of time in which a rank of the pipeline is idle, over all ranks."""
    layout = Layout(schedule, ranks, 4 * ranks)
    orders = [list(_actions(order)) for _, order in sorted(_orders(layout, microbatches).items())]
    ends, free, at = dict[Any, int](), [0] * ranks, [0] * ranks
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while (
                at[rank] < len(order) and (start := _start(order[at[rank]], ends, layout.stages)) is not None
            ):
                free[rank] = max(free[rank], start) + SLOTS[order[at[rank]][0]]
                _note(order[at[rank]], ends, free[rank])
                at[rank] += 1
        assert sum(at) > before, "the schedule waits for itself"
    busy = sum(SLOTS[kind] for order in orders for kind, _, _ in order)
    return 1 - busy / (ranks * max(free))


def _start(action: tuple[str, int, int], ends: dict[Any, int], stages: int) -> int | None:
    """Returns when all is there that an action needs; None: not known yet."""
    kind, stage, number = action
    needs = {
        "F": [("F", stage - 1, number)] if stage else [],
        "W": [("I", stage, number)],
    }.get(kind, [("F", stage, number), *([("I", stage + 1, number)] if stage + 1 < stages else [])])
    return max((ends[need] for need in needs), default=0) if all(need in ends for need in needs) else None


def _note(action: tuple[str, int, int], ends: dict[Any, int], end: int) -> None:
    kind, stage, number = action
    ends["I" if kind == "B" else kind, stage, number] = (
        end  # a whole backward has the gradients of inputs, too
    )


def _actions(order: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yields kind, stage and number of a rank's actions; torch's own numbers are wrong for the last rank of 1F1B."""
    done = Counter[tuple[str, int]]()
    for action in order:
        for part in (action and action.sub_actions) or (action,):
            if part is None or part.computation_type.value not in SLOTS:
                continue
            kind, stage = part.computation_type.value, part.stage_index
            backward = "W" if kind == "W" else "F" if kind == "F" else "I"
            yield kind, stage, done[backward, stage]
            done[backward, stage] += 1


def _orders(layout: Layout, microbatches: int) -> dict[int, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        stages = [
            PipelineStage(torch.nn.Identity(), stage, layout.stages, torch.device("cpu"))
            for stage in range(layout.stages)
            if layout.rank_of(stage) == 0
        ]
        kind = get_schedule_class(layout.schedule)
        given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        orders: dict[int, Any] = kind(given, n_microbatches=microbatches, loss_fn=torch.sum).pipeline_order
        return orders
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Prints the table."""
    print(
        "| schedule | ranks | micro-batches | batches of a step | idle, a schedule each | idle, one schedule |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for schedule, ranks, microbatches, batches in CASES:
        each = idle_share(schedule, ranks, microbatches)
        together = batches if Layout(schedule, ranks, 0).takes(microbatches * batches) else 1
        one = idle_share(schedule, ranks, microbatches * together)
        print(f"| {schedule} | {ranks} | {microbatches} | {batches} | {each:.1%} | {one:.1%} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
