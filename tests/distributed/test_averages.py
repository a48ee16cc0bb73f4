"""The loss of averaged weights where no rank holds them whole."""

import pytest

from tests.support.same_run import STEPS, fit, one_process

AVERAGED = {"callbacks": [{"class_path": "ExponentialMovingAverage", "init_args": {"decay": 0.9}}]}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "init_args"),
    [
        ("FSDP", {"stage": 3}),
        pytest.param("FSDP", {"stage": 2}, marks=pytest.mark.ci),
        pytest.param("HybridParallel", {"tensor": 2}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_the_loss_of_the_averages_is_that_of_one_process(strategy, init_args):
    chosen = {"strategy": {"class_path": strategy, "init_args": init_args}}
    found = fit({"trainer": chosen | AVERAGED}, 2)
    assert found.code == 0, found.error_text
    figures, expected = (
        run.record["figures"][str(STEPS)] for run in (found, one_process({"trainer": AVERAGED}))
    )
    # that of the weights, which a block that was gathered before would give, is 1e-2 away
    assert abs(expected["val/ema_loss"] / expected["val/loss"] - 1) > 1e-4
    assert figures["val/ema_loss"] == pytest.approx(expected["val/ema_loss"], rel=1e-6)
