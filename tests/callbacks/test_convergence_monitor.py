"""ConvergenceMonitor: its interval over all orders, verdicts on curves, a stop, and restarts that survive a resume."""

import itertools
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from callbacks.convergence_monitor import SLOPE, judge, slope_at_end
from core.errors import ConfigError
from tests.support import token_runs
from tests.support.cli_runs import checkpoint, core, state  # noqa: F401
from tests.support.same_states import same

WATCHED = Path("runs/watched")
STEPS = np.arange(1, 9) * 100.0


@pytest.mark.parametrize("n", [5, 6, 7])
def test_the_interval_misses_no_slope_in_at_most_one_of_twenty_orders(n):
    """Over all orders of n losses, which are equally likely where there is no slope."""
    x = np.arange(n, dtype=float)
    found = [slope_at_end(x, np.array(y, dtype=float)) for y in itertools.permutations(range(n))]
    outside = sum(low > 0 or high < 0 for _, low, high in found)
    assert 0 < outside <= 0.05 * len(found)


def test_the_slope_is_the_median_of_all_pairs_and_along_the_logarithm_that_at_the_end():
    x, y = [1.0, 2.0, 4.0, 7.0, 11.0, 12.0], [3.0, 2.5, 2.6, 1.0, 9.0, 0.5]
    pairs = [(b - a) / (u - t) for (t, a), (u, b) in itertools.combinations(zip(x, y, strict=True), 2)]
    assert slope_at_end(np.array(x), np.array(y))[0] == pytest.approx(statistics.median(pairs), rel=1e-12)
    curve = 5 - 0.3 * np.log(STEPS)
    assert slope_at_end(STEPS, curve, "log") == pytest.approx([-0.3 / STEPS[-1]] * 3, rel=1e-9)


@pytest.mark.parametrize(
    ("losses", "training", "verdict"),
    [
        (4 - STEPS / 1000, 4 - STEPS / 1000, "falling"),
        (3 + 1e-4 * np.cos(STEPS), 3 - 1e-4 * STEPS / 1000, "converged"),
        (3 + STEPS / 1000, 3 - STEPS / 1000, "over-fitting"),
        (3 + STEPS / 1000, 3 + STEPS / 1000, "diverging"),
        (3 + np.cos(STEPS), 3 + np.cos(STEPS), "undecided"),
        (np.where(STEPS < 800, 3.0, np.nan), np.full(8, 3.0), "diverging"),
    ],
)
def test_verdicts(losses, training, verdict):
    points = np.stack([STEPS, losses, training], axis=1).tolist()
    assert judge(points, 8)[0] == verdict
    assert judge(points[:7], 8)[0] == "undecided"
    if verdict == "falling":  # one odd validation does not change it
        points[3][1] += 5
        found, figures = judge(points, 8)
        assert (found, figures[SLOPE]) == (verdict, pytest.approx(-1.0, rel=1e-9))


def fit(core, *words, **monitor):  # noqa: F811
    options = {"window": 5, "tolerance": 0.0, **monitor}
    config = {
        "trainer": {"val_check_interval": 1, "log_every_n_steps": 1, "limit_val_batches": 1, "max_steps": 14}
    }
    config["trainer"]["callbacks"] = {
        "PeriodicCheckpoint": {"every_n_steps": 1, "keep": -1},
        "ConvergenceMonitor": options,
    }
    Path("watched.yaml").write_text(json.dumps({"base": "tiny.yaml", **config}))
    return core("fit", "--config", "watched.yaml", *words)


UPHILL = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=10", "--model.optimizer.maximize=true")


def test_a_stopped_run_ends_well_and_says_why(core):  # noqa: F811
    done = fit(core, "--model.optimizer.lr=0", stop=True, tolerance=0.5, restarts=1, restart_above=100.0)
    assert done.code == 0, done
    assert "the run ends at step 5: converged" in done.err
    assert "step 5" in done.err
    assert checkpoint(5, WATCHED).is_file()
    assert not checkpoint(6, WATCHED).is_file()


@pytest.mark.ci
def test_a_run_that_diverges_begins_again_and_a_resumed_one_does_the_same(core):  # noqa: F811
    done = fit(core, *UPHILL, restarts=1)
    assert done.code == 0, done
    assert "begins again at step 5 from seed 1, learning rate times 0.5: restart 1 of 1" in done.err
    end, folder = state(checkpoint(14, WATCHED)), WATCHED / "checkpoints"
    restarted = state(checkpoint(1, WATCHED))
    assert restarted["callbacks"]["ConvergenceMonitor"]["restarted"] == 1
    due = next(folder.glob("step-00000005.abandoned*.ckpt"))
    assert state(due)["callbacks"]["ConvergenceMonitor"]["due"]
    for path in (checkpoint(7, WATCHED), due):
        done = core("fit", "--ckpt_path", path)
        assert done.code == 0, done
        again = state(checkpoint(14, WATCHED))
        for part in ("state_dict", "optimizer_states", "loops"):
            assert same(again[part], end[part]), (path, part)


@pytest.mark.ci
def test_a_run_that_is_stuck_above_a_loss_begins_again_and_a_resumed_one_does_the_same(core):  # noqa: F811
    stuck = {"restarts": 1, "restart_above": 1.0, "tolerance": 0.5}
    done = fit(core, "--model.optimizer.lr=0", "--trainer.max_steps=7", **stuck)
    assert done.code == 0, done
    assert "step 5: stuck: no loss of the window is below restart_above (1)" in done.err
    assert "begins again at step 5 from seed 1, learning rate times 0.5: restart 1 of 1" in done.err
    assert done.err.count("begins again") == 1  # the second attempt is stuck too
    due = next((WATCHED / "checkpoints").glob("step-00000005.abandoned*.ckpt"))
    end, before = state(checkpoint(7, WATCHED)), state(due)
    assert before["callbacks"]["ConvergenceMonitor"]["due"]
    assert not same(end["state_dict"], before["state_dict"])  # another seed's, at a rate of 0
    assert core("fit", "--ckpt_path", due).code == 0
    again = state(checkpoint(7, WATCHED))
    assert same(again["state_dict"], end["state_dict"])
    assert same(*(found["callbacks"]["ConvergenceMonitor"] for found in (again, end)))


@pytest.mark.slow
def test_under_zero_a_run_begins_again_as_under_ddp():
    uphill = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5, "maximize": True}}
    parts = (
        {"trainer": {"max_steps": 9, "val_check_interval": 1}, "model": {"optimizer": uphill}},
        token_runs.callback("ConvergenceMonitor", window=5, tolerance=0.0, restarts=1),
    )
    zero = token_runs.strategy("DeepSpeedZero", stage=3, persistence_threshold=0)
    found = token_runs.fit(*parts, zero, ranks=2)
    expected = token_runs.fit(*parts, token_runs.strategy("DDP"), ranks=2)
    assert "begins again at step 5 from seed" in found.error_text
    losses = [
        [figures["train/loss"] for figures in run.record["figures"].values()] for run in (found, expected)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.ci
def test_lightnings_early_stopping_counts_on_after_a_resume(core):  # noqa: F811
    early = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.patience=3",
    ]
    early.append(
        "--trainer.callbacks.check_on_train_epoch_end=false"
    )  # Lightning takes an interval of 1 for an epoch
    assert fit(core, "--model.optimizer.lr=0", *early).code == 0
    steps = sorted(path.name for path in (WATCHED / "checkpoints").iterdir())
    assert steps[-1] == checkpoint(4, WATCHED).name  # the first validation, and three that are no better
    end = state(checkpoint(4, WATCHED))
    assert core("fit", "--ckpt_path", checkpoint(2, WATCHED)).code == 0
    again = state(checkpoint(4, WATCHED))
    assert not checkpoint(5, WATCHED).exists()
    assert same(again["callbacks"], end["callbacks"])
    assert same(again["state_dict"], end["state_dict"])


def test_mistakes():
    from callbacks.convergence_monitor import ConvergenceMonitor

    with pytest.raises(ConfigError, match="window >= 5"):
        ConvergenceMonitor(window=4)
    with pytest.raises(ConfigError, match=r"restart_above together with restarts >= 1, not 3.0 and 0"):
        ConvergenceMonitor(restart_above=3.0)
