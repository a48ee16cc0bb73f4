"""Rules about time: what a step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toolkit.diagnosis.case import Case, Finding, Rule
from toolkit.diagnosis.parts import packing_remedy


def data_bound(case: Case) -> Iterator[Finding]:
    """Steps wait for data."""
    share = case.series("time/data_share")
    if len(share) < WINDOW:
        return
    middle = np.median(np.lib.stride_tricks.sliding_window_view(share.values, WINDOW), axis=1)
    bad = np.concatenate([np.zeros(WINDOW - 1, bool), middle > 0.5])
    if bad.any():
        workers = int(case.number("data.num_workers", 0))
        yield Finding(
            "data_bound", share.first_step(bad), f"{np.median(share.values[bad]):.0%} of the time is spent waiting for data", 0.84,
            "Read ahead in more processes", packing_remedy(case) or {"data": {"init_args": {"num_workers": max(2, 2 * workers)}}},
        )  # fmt: skip


WINDOW = 6
"""Logged steps of which the median counts: the first one waits for the data to be opened."""

RULES: tuple[Rule, ...] = (data_bound,)
