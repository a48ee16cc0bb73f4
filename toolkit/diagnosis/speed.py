"""Rules about time: what a step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.history import Series
from toolkit.diagnosis.parts import packing_remedy, without_callbacks

# What makes a run slow is said after what makes it wrong: confidences here are below those of all other rules.

WINDOW = 6
"""Logged steps of which the median counts: the first one waits for the data to be opened."""


def _steadily(case: Case, name: str, limit: float, window: int = WINDOW) -> tuple[int, float] | None:
    """Returns since when the median of some logged values of a figure is above a limit, and the figure; None: never."""
    series = case.series(name)
    if len(series) < window:
        return None
    middle = np.median(np.lib.stride_tricks.sliding_window_view(series.values, window), axis=1)
    bad = middle > limit
    return (int(series.steps[int(np.argmax(bad)) + window - 1]), float(middle[bad][0])) if bad.any() else None


def data_bound(case: Case) -> Iterator[Finding]:
    """Steps wait for data: each of them, or some so long that it is most of the time."""
    if found := _steadily(case, "time/data_share", 0.4) or _in_all(case.series("time/data_share"), 0.35):
        workers = int(case.number("data.num_workers", 0))
        yield Finding(
            "data_bound", found[0], f"{found[1]:.0%} of the time is spent waiting for data", 0.645,
            "Read ahead in more processes",
            packing_remedy(case) or without_callbacks(case) or {"data": {"init_args": {"num_workers": max(2, 2 * workers)}}},
        )  # fmt: skip


def reading(case: Case) -> Iterator[Finding]:
    """Batches take many times as long to read as with leyden's packing, and a part of a step that counts."""
    read, plain, step = (case.last(f"time/{one}_ms") for one in ("read", "plain_read", "step_p50"))
    share = read * case.number("trainer.accumulate_grad_batches", 1) / max(step, 1e-9)
    if read > 5 * plain and share > 0.08 and len(case.series("time/step_p50_ms")) >= WINDOW:
        yield Finding(
            "data_bound", int(case.series("time/step_p50_ms").steps[WINDOW - 1]), f"a batch takes {read:.2g} ms to read, with leyden's packing {plain:.2g} "
            f"ms: {share:.0%} of a step", 0.65, "Take leyden's packing", packing_remedy(case) or without_callbacks(case),
        )  # fmt: skip


def _in_all(shares: Series, limit: float) -> tuple[int, float] | None:
    """Returns since when waiting takes more than a share of `LONG` logged steps together, given the share in each of them.

    A step's work takes about as long in all of them, so that one with a share s took 1 / (1 - s) times as long as its work. The
    longest step is left out: that of a machine with other work is no habit.
    """
    if len(shares) < LONG:
        return None
    length = 1 / (1 - np.clip(shares.values, 0, 0.99))
    windows = (
        np.lib.stride_tricks.sliding_window_view(one, LONG) for one in (shares.values * length, length)
    )
    waited, whole = (one.sum(1) - one.max(1) for one in windows)
    bad = waited / whole > limit
    index = int(np.argmax(bad))
    return (int(shares.steps[index + LONG - 1]), float(waited[index] / whole[index])) if bad.any() else None


LONG = 16


def checkpoint_stall(case: Case) -> Iterator[Finding]:
    """Much of the time goes into writing checkpoints."""
    share = case.series("time/checkpoint_share")
    bad = share.values > 0.2
    if len(share) >= 2 and bad[1:].any():
        saving = [item for item in case.callbacks() if "Checkpoint" in str(item.get("class_path"))]
        remedy = {}
        if saving:
            name = str(saving[0]["class_path"]).rpartition(".")[2]
            given = saving[0].get("init_args") or {}
            option = "every_n_steps" if "every_n_steps" in given else "every_n_train_steps"
            remedy = {"trainer": {"callbacks": {name: {option: 10 * int(given.get(option) or 1)}}}}
        yield Finding(
            "checkpoint_stall", int(share.steps[1]), f"{share.values[1:][bad[1:]][-1]:.0%} of the time goes into writing checkpoints", 0.655,
            "Write them less often, or with ShardedCheckpoint, which goes on training meanwhile", remedy,
        )  # fmt: skip


def communication_bound(case: Case) -> Iterator[Finding]:
    """Steps wait for other ranks."""
    watched = len(case.series("time/collectives_least")) > 0  # tells waiting for others from sending
    if not watched and (found := _steadily(case, "time/communication_share", 0.4)):
        batches = 2 * int(case.number("trainer.accumulate_grad_batches", 1))
        yield Finding(
            "communication_bound", found[0], f"{found[1]:.0%} of the time is spent in collectives that nothing overlaps", 0.63,
            "Send gradients less often: more micro-batches a step", {"trainer": {"accumulate_grad_batches": batches}},
        )  # fmt: skip


def rank_times(case: Case) -> Iterator[Finding]:
    """One rank works longer than the others, or all are in collectives for long, in steps that were watched from end to end."""
    since = _in_a_row(case.series("time/rank_waits"))
    if since is not None:
        yield Finding(
            "data_bound", since, f"a rank waits longer for data than the median by {case.at('time/rank_waits', since):.0%} of the time", 0.649,
            "Read ahead in more processes, from the disk of the others", packing_remedy(case) or without_callbacks(case),
        )  # fmt: skip
    if (at := _in_a_row(case.series("time/rank_behind"))) is not None:
        yield Finding(
            "straggler", at, f"the slowest rank works longer than the median by {case.at('time/rank_behind', at):.0%} of the time", 0.648,
            "Let Heartbeat name it", without_callbacks(case) or {"trainer": {"callbacks": {"Heartbeat": {}}}},
        )  # fmt: skip
    elif waits := _steadily(case, "time/collectives_least", 0.5, WATCHED):
        yield Finding(
            "communication_bound", waits[0], f"every rank is in collectives for {waits[1]:.0%} of the time and more", 0.646,
            "Send less, or less often", without_callbacks(case),
        )  # fmt: skip


def _in_a_row(shares: Series) -> int | None:
    """Returns the step in which a share was above a fifth in `WATCHED` looks in a row; None: never."""
    if len(shares) < WATCHED:
        return None
    long = np.convolve(shares.values > 0.2, np.ones(WATCHED), "valid") >= WATCHED
    return int(shares.steps[int(np.argmax(long)) + WATCHED - 1]) if long.any() else None


def straggler(case: Case) -> Iterator[Finding]:
    """One rank is slower than the others, nearly always: on a busy machine each is, now and then."""
    ratio = case.series("time/slowest_rank_ratio")
    if len(ratio) >= LONG:
        usual = np.quantile(np.lib.stride_tricks.sliding_window_view(ratio.values, LONG), 0.2, axis=1)
        if (usual > 1.3).any():
            at = int(np.argmax(usual > 1.3))
            yield Finding(
                "straggler", int(ratio.steps[at + LONG - 1]), f"the slowest rank computes at least {usual[at]:.2f} times as long as the "
                "median in most steps", 0.64, "Let Heartbeat name it", {"trainer": {"callbacks": {"Heartbeat": {}}}},
            )  # fmt: skip


def fragmentation(case: Case) -> Iterator[Finding]:
    """Memory is reserved that no tensor uses."""
    if found := _steadily(case, "memory/fragmentation", 0.4):
        yield Finding(
            "fragmentation", found[0], f"{found[1]:.0%} of the reserved memory is free in pieces", 0.62,
            "Take PYTORCH_ALLOC_CONF out of the environment, or add expandable_segments:True to it",
        )  # fmt: skip


WATCHED = 10
"""Looks in a row, each over the last dozen watched steps, in which one rank is behind."""

RULES: tuple[Rule, ...] = (
    reading,
    rank_times,
    data_bound,
    checkpoint_stall,
    communication_bound,
    straggler,
    fragmentation,
)
