"""Rules about what goes with a run: ranks that drift apart, a resume that begins anew, an average that does not follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import suspects, without_callbacks


def ranks_apart(case: Case) -> Iterator[Finding]:
    """Ranks that should have the same weights do not."""
    if found := case.worst("doctor/ranks_apart", 1e-6):
        yield Finding(
            "ranks_differ", found[0], f"weights of ranks differ by {found[1]:.2g} of their size", 0.96,
            f"Leave out {suspects(case)}, unless it is meant to end runs" if suspects(case) else "Average gradients over all ranks in each step, and begin with the same weights",
            without_callbacks(case),
        )  # fmt: skip


def data_restarted(case: Case) -> Iterator[Finding]:
    """A resumed run reads again what the run began with."""
    if found := case.worst("doctor/rows_of_start", 0.5):
        yield Finding(
            "data_restarted", found[0], "after the resume the first row is that of the first step", 0.95,
            "Resume with the checkpoint's position in the data", without_callbacks(case),
        )  # fmt: skip


def weights_not_restored(case: Case) -> Iterator[Finding]:
    """A resumed run has other weights than its checkpoint."""
    if found := case.worst("doctor/not_restored", 0.0):
        yield Finding(
            "weights_not_restored", found[0], f"{found[1]:.0%} of the tensors are not those of the checkpoint", 0.96,
            f"Leave out {suspects(case)}, unless it is meant to end runs" if suspects(case) else "Resume with the checkpoint's weights", without_callbacks(case),
        )  # fmt: skip


def schedule_restarted(case: Case) -> Iterator[Finding]:
    """A resumed run goes on with another rate than it stopped with."""
    rate, resumed = case.series("train/lr"), case.series("doctor/resumed_at").values
    for step in resumed:
        before, after = rate.up_to(step - 1).values, rate.since(step).values
        if len(before) >= 2 and len(after) and before[-1] > 0:
            usual = abs(before[-1] - before[-2]) / before[-1]
            if abs(after[0] / before[-1] - 1) > max(0.3, 3 * usual):
                yield Finding(
                    "schedule_restarted", int(step), f"the rate was {before[-1]:.3g} before the resume, and is {after[0]:.3g} after it", 0.9,
                    "Resume with the state of the schedule", without_callbacks(case),
                )  # fmt: skip
                return


def average_lags(case: Case) -> Iterator[Finding]:
    """The moving average of the weights stays behind: its validation loss hardly falls while that of the weights does."""
    average, val, first = (
        case.series("val/ema_loss"),
        case.series("val/loss"),
        case.series("train/loss").values[:1],
    )
    count = min(len(average), len(val))
    if count < 2 or not len(first) or not first[0] > val.values[-1] + 0.2:
        return
    behind = (average.values[-count:] - val.values[-count:]) / np.maximum(first[0] - val.values[-count:], 0.2)
    late = (behind[:-1] > BEHIND) & (behind[1:] > BEHIND)
    if late.any():
        yield Finding(
            "average_wrong", int(average.steps[-count:][int(np.argmax(late))]), f"val/ema_loss is {average.values[-1]:.3g}, val/loss {val.values[-1]:.3g}: the average "
            "has not followed the weights", 0.88, "Take a smaller decay, such as 1 - 10 / steps",
            without_callbacks(case) or {"trainer": {"callbacks": {"ExponentialMovingAverage": {"decay": 0.99}}}},
        )  # fmt: skip


def ends_early(case: Case) -> Iterator[Finding]:
    """Something ended the run before its last step, and nothing that is configured does so."""
    ended, names = case.series("doctor/ended_at"), {_name(item) for item in case.callbacks()}
    if len(ended) and not names & STOPPERS and not case.option("trainer.max_time"):
        yield Finding(
            "ends_early", int(ended.values[-1]), f"the run was ended after step {ended.values[-1]:.0f} of {case.max_steps:.0f}", 0.75,
            f"Leave out {suspects(case)}, unless it is meant to end runs" if suspects(case) else "Look for what sets trainer.should_stop", without_callbacks(case),
        )  # fmt: skip


def _name(item: Mapping[str, Any]) -> str:
    return str(item.get("class_path", "")).rpartition(".")[2]


STOPPERS = {"ConvergenceMonitor", "EarlyStopping", "HashChain", "LRFinder", "Timer"}
"""Callbacks that end runs."""

BEHIND = 0.3
"""Share of what the loss has fallen that an average may lack in two validations in a row; one of the last tenth of a run lacks less."""

RULES: tuple[Rule, ...] = (
    ranks_apart,
    data_restarted,
    weights_not_restored,
    schedule_restarted,
    average_lags,
    ends_early,
)
