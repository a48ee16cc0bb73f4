"""ConvergenceMonitor: its interval against scipy's, verdicts on curves, a stop, and restarts that survive a resume."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import theilslopes

from callbacks.convergence_monitor import SLOPE, judge, slope_at_end
from core.errors import ConfigError
from tests.support.cli_runs import RUN, checkpoint, core, state  # noqa: F401
from tests.support.same_states import same

STEPS = np.arange(1, 9) * 100.0


@pytest.mark.parametrize("n", [5, 6, 8, 20])
def test_slope_and_interval_are_those_of_scipy(n):
    random = np.random.default_rng(n)
    x, y = np.cumsum(random.integers(1, 9, n)).astype(float), random.normal(size=n)
    found, (slope, _, low, high) = slope_at_end(x, y), theilslopes(y, x, 0.95)
    assert found == pytest.approx((slope, low, high), rel=1e-12)
    along = slope_at_end(x, y, "log")
    assert along[0] == pytest.approx(theilslopes(y, np.log(x))[0] / x[-1], rel=1e-12)


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
        assert judge(points, 8) == (verdict, pytest.approx({SLOPE: -1.0}, rel=1e-9) | judge(points, 8)[1])


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


DIVERGING = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=-0.5", "--model.lr_scheduler=null")
"""Goes uphill."""


def test_a_stopped_run_ends_well_and_says_why(core):  # noqa: F811
    done = fit(core, "--model.optimizer.lr=0", stop=True, tolerance=0.5)
    assert done.code == 0, done
    assert "the run ends at step 5: converged" in done.err
    assert "step 5" in done.err
    assert checkpoint(5, Path("runs/watched")).is_file()
    assert not checkpoint(6, Path("runs/watched")).is_file()


def test_mistakes():
    from callbacks.convergence_monitor import ConvergenceMonitor

    with pytest.raises(ConfigError, match="window >= 5"):
        ConvergenceMonitor(window=4)
