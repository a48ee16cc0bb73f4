"""Percentiles and shares of real steps, in one process and on two ranks."""

import time
from itertools import pairwise

import pytest
import torch

from callbacks.step_time import StepTime, exposed_seconds
from core.errors import ConfigError
from plugins.loggers.metrics_csv import MetricsCSV
from tests.support.launched_ranks import column, forked, results
from tests.support.uneven import UnevenData
from toolkit.collectives import Collective, WatchCollectives
from toolkit.intervals import common, length, union

SHARES = ("data", "forward", "backward", "optimizer", "other")


class Slow:
    """Yields batches, each after a wait."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            time.sleep(0.05)
            yield batch


class SlowData(UnevenData):
    """Rank 1 waits for its training data."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        return Slow(loader.batches) if self.trainer.global_rank else loader


def test_intervals_agree_with_points():
    """Against a million points of a line."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(1000, (2, 30, 2), generator=generator).sort(-1).values for _ in "ab")
    spans = [[tuple(span) for span in some[0].tolist()] for some in (one, other)]
    points = [torch.zeros(1000, dtype=torch.bool) for _ in spans]
    for marked, some in zip(points, spans, strict=True):
        for begin, end in some[:8]:
            marked[begin:end] = True
    left, right = (union(some[:8]) for some in spans)
    assert length(left) == points[0].sum()
    assert length(common(left, right)) == (points[0] & points[1]).sum()
    assert all(a[1] < b[0] for a, b in pairwise(left))


def test_communication_is_what_no_computation_hides():
    watch = WatchCollectives(time.perf_counter)
    watch.collectives = [
        Collective("all_reduce", 8, 12.0, 16.0),
        Collective("all_reduce", 8, 15.0, 19.0),
        Collective("send", 8, 11.0),  # torch does not say when it ended
    ]
    watch.computing = [(10.0, 14.0), (15.5, 16.5)]
    found = exposed_seconds(
        watch, 10.0, [("forward", 0.0, 5.0), ("backward", 5.0, 8.0), ("pause", 8.0, 20.0)]
    )
    # under way from 2 to 9, of which 2 to 4 and 5.5 to 6.5 are hidden, and the pause begins at 8
    assert found == {"data": 0, "forward": 1, "backward": 2, "optimizer": 0, "other": 0}


def test_shares_are_one_and_slow_data_is_most_of_them(fit, data, tmp_path):
    module = data()
    module.train_dataloader = lambda: Slow(list(type(module).train_dataloader(module)))
    logger = MetricsCSV(str(tmp_path))
    run = fit(
        tmp_path, [StepTime(window=8)], data=module, max_steps=15, val_check_interval=7, logger=[logger]
    )
    found = {name: float(value) for name, value in run.trainer.callback_metrics.items() if "time/" in name}
    assert sum(found[f"time/{name}_share"] for name in SHARES) == pytest.approx(1, abs=1e-12)
    assert max(SHARES, key=lambda name: found[f"time/{name}_share"]) == "data"
    assert 50 <= found["time/step_p50_ms"] <= found["time/step_p90_ms"] <= found["time/step_p99_ms"]
    assert "time/communication_share" not in found
    assert len(run.callback(StepTime)._steps) == 8


@pytest.mark.ci
def test_two_ranks_see_communication_and_the_slow_one(tmp_path):
    words = ["--trainer.callbacks+=StepTime", "--trainer.callbacks.every_n_steps=2", "--trainer.max_steps=5"]
    words += ["--data=tests.callbacks.test_step_time.SlowData", "--trainer.limit_val_batches=0"]
    done = forked(2, tmp_path, *words)
    assert done.code == 0, done.error_text
    figures, _ = results(tmp_path)
    last = {name: float(value) for name, value in figures[5].items() if name.startswith("time/")}
    shares = sum(value for name, value in last.items() if name.endswith("_share"))
    assert shares == pytest.approx(1, abs=1e-6)  # float32 between the ranks
    # rank 1 waits 50 ms for each of two batches of a step, and rank 0 as long in its backward pass
    assert last["time/communication_share"] > 0.25
    assert last["time/slowest_rank_ratio"] > 1.5
    assert not [value for value in column({2: figures[2]}, "time/communication_share") if value == 0]


@pytest.mark.parametrize("options", [{"window": 0}, {"every_n_steps": 1}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match="window >= 1"):
        StepTime(**options)
