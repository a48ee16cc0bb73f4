"""Which block left its band first: slow drifts, returns, rates that jump, rollbacks, and what a resumed run had before."""

import numpy as np
import pytest

from core.errors import ConfigError
from toolkit.update_history import KEPT, UpdateHistory, departures, with_table


def history(*ratios, every=1):
    """Returns a history of blocks with these ratios over steps."""
    found = UpdateHistory([f"block.{n}" for n in range(len(ratios))])
    for number, row in enumerate(zip(*ratios, strict=True), 1):
        found.add(number * every, row)
    return found


def noisy(count, seed=0):
    return 1e-3 * np.exp(0.1 * np.random.default_rng(seed).standard_normal(count))


def test_the_first_to_leave_comes_first_and_one_that_came_back_is_no_departure():
    steady, early, late, back = (noisy(60, seed) for seed in range(4))
    early[50:], late[55:], back[30:40] = early[50:] * 5, late[55:] / 9, back[30:40] * 9
    found = departures(history(steady, late, back, early, every=10), 600)
    assert [(one.block, one.step) for one in found] == [("block.3", 510), ("block.1", 560)]
    assert found[0].low < 1e-3 < found[0].high < found[0].ratio
    assert found[1].ratio < found[1].low
    # later figures do not count
    assert departures(history(steady, late, back, early, every=10), 555)[0].block == "block.3"
    assert departures(history(steady, late, back, early, every=10), 505) == []


def test_a_band_moves_with_the_rate():
    falling = noisy(200) * np.linspace(1, 0.01, 200)
    assert departures(history(falling), 199) == []
    jumped = noisy(90)
    jumped[40:] *= 10
    assert [one.step for one in departures(history(jumped), 60)] == [41]
    assert [one.step for one in departures(history(jumped), 71)] == [41]
    assert departures(history(jumped), 90) == []  # inside again after 32 figures


def test_few_figures_missing_ones_and_those_that_are_not_finite():
    assert departures(history(noisy(8)), 8) is None
    gaps = noisy(20)
    gaps[[0, 3, 15]], gaps[1] = np.nan, 0.0
    assert departures(history(gaps), 20) == []
    gaps[19] = np.inf
    assert [one.step for one in departures(history(gaps), 20)] == [20]


def test_a_rollback_replaces_steps_and_old_ones_are_dropped():
    found = history(noisy(KEPT + 10))
    assert found.steps[-1] == KEPT + 10
    assert len(found.steps) == KEPT // 2 + 10
    found.add(KEPT, [7.0])
    assert (found.steps[-1], found.ratios[-1, 0]) == (KEPT, 7.0)
    assert (np.diff(found.steps) == 1).all()


def test_a_resumed_run_goes_on_from_its_table(tmp_path):
    values, path = noisy(40), tmp_path / "metrics.csv"
    rows = [f"{step},1.0,{value!r}" for step, value in enumerate(values[:30].tolist(), 1)]
    path.write_text("\n".join(["step,train/loss,update_ratio/block.0", *rows, "31,1.0,", "32,1"]))
    short = UpdateHistory(["block.0"])
    for step in range(29, 41):
        short.add(step, [values[step - 1]])
    whole = with_table(short, path)
    assert whole.steps.tolist() == list(range(1, 41))
    assert whole.ratios[:, 0].tolist() == values.tolist()
    assert with_table(short, tmp_path / "none.csv") is short
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not as MetricsCSV writes it"):
        with_table(short, path)
