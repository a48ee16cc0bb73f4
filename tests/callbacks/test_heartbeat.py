"""Two real ranks, one of which is slow, then stands still."""

import re
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from callbacks.heartbeat import Heartbeat
from core.errors import ConfigError
from tests.support.launched_ranks import forked, results
from tests.support.uneven import Resumable, UnevenData


class Slow(Resumable):
    """Waits before each batch."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.3)
            yield batch


class SlowData(UnevenData):
    """Rank 1 waits for its training data."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        if self.trainer.global_rank:
            loader.__class__ = Slow
        return loader


IN = ("backward", "on_before_backward")
"""Where each rank is then: rank 0 waits for the other's gradients."""


def stacks_of(folder):
    return [Path(folder, f"stacks.rank{rank}.txt") for rank in (0, 1)]


class StandStill(Callback):
    """Rank 1 stands still in the middle of a step, until the stacks of both are written."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            end = time.monotonic() + 100
            while (
                not all(map(self.written, stacks_of(trainer.default_root_dir), IN)) and time.monotonic() < end
            ):
                time.sleep(0.1)

    def written(self, path, function):
        return path.exists() and f"in {function}" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path):
    words = [
        "--trainer.callbacks+=Heartbeat",
        "--data=tests.callbacks.test_heartbeat.SlowData",
        "--trainer.limit_val_batches=0",
    ]
    done = forked(2, tmp_path, *words, "--trainer.max_steps=3")
    assert done.code == 0, done.error_text
    figures, _ = results(tmp_path)
    for row in figures.values():
        assert float(row["heartbeat/slowest_rank"]) == 1
        assert float(row["heartbeat/slowest_over_median"]) > 1.5
    found = re.search(
        r"step 3: rank 1 on \S+ takes [\d.]+ times the median.*: ([\d.]+) s for data", done.stderr
    )
    assert 0.25 < float(found[1]) < 3
    assert not list((tmp_path / "run").glob("stacks.*"))


@pytest.mark.ci
def test_a_run_that_stands_still_leaves_the_stacks_of_all_ranks(tmp_path):
    words = [
        "--trainer.callbacks+=Heartbeat",
        "--trainer.callbacks.timeout_s=2",
        "--trainer.limit_val_batches=0",
    ]
    words += ["--trainer.callbacks+=tests.callbacks.test_heartbeat.StandStill", "--trainer.max_steps=4"]
    done = forked(2, tmp_path, *words)
    assert done.code == 0, done.error_text
    stacks = [path.read_text(encoding="utf-8") for path in stacks_of(tmp_path / "run")]
    for text, function in zip(stacks, IN, strict=True):
        assert "Timeout (0:00:02)!" in text
        assert f"in {function}" in text
    assert "test_heartbeat.py" in stacks[1]


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"straggler": 1.0}])
def test_mistakes(options):
    with pytest.raises(ConfigError, match="timeout_s > 0 and straggler > 1"):
        Heartbeat(**options)


def test_one_process_alone_keeps_no_times_beyond_a_logged_step(fit, tmp_path):
    """It has nobody to share them with; on CUDA they are events, which would fill the device."""
    heartbeat = Heartbeat()
    fit(tmp_path, [heartbeat], max_steps=12, log_every_n_steps=5, limit_val_batches=0)
    assert len(heartbeat._clock.read()) == 2
